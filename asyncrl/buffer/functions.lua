#!lua name=asyncrl_@DIGEST@
-- The buffer inside the store: the operations of memory.py. Every function is atomic and may be repeated.
--
-- An issued id is always in exactly one of these places:
--   leased     zset  id by id, with  deadlines  zset  id by end of lease, ms of the server's clock, and  holders  hash  id -> holder
--   reissue    zset  id by id, to be leased again
--   ready      zset  id by id, the frame is in  frames  hash  id -> frame
--   takes      hash  number -> "previous chain unshortened id id ..."; the frames of its ids are kept until the commit
--   done       set   ids above meta.watermark; all ids up to it are done as well
-- Other keys of a lane:
--   meta          hash  epoch owner version limit most history closed starving last chain committed watermark; written by
--                       the learner only; most: the highest limit so far
--   totals        hash  issued bytes
--   requests      hash  holder -> "request id id ..." of its last lease of tickets, so that a call with a lost reply can be repeated
--   attempts      hash  id -> failures so far
--   deaths        hash  id -> holders that died, or lost their lease, since the id was issued or stored
--   dead_letters  list  newest first: "id reason", newline, the beginning of the frame
--   counters      hash  name -> count
--
-- Functions validate first and then write, because a function that fails half-way is not undone. The only clock is the
-- server's, and only the ends of leases depend on it. When memory is short, all functions but LEASE, OFFER and PUT may run.
--
-- The server checks the caller's rights at every command in here (users.py). The generators' functions write nothing that
-- belongs to the learner, and the learner's functions begin with a write of meta, which generators may not do.
-- Generators may have written any value to the other keys. So a value that is not a number is read as 0, and a member that
-- is not the id of a ticket under way is dropped. If a key has another type, the learner gets a gap and recovers, and
-- generators find nothing to do.

local PLACES = {'meta', 'leased', 'deadlines', 'holders', 'reissue', 'ready', 'frames', 'takes', 'done', 'requests',
                'attempts', 'deaths', 'dead_letters', 'counters', 'totals'}
local ZSETS = {'leased', 'deadlines', 'reissue', 'ready'}
local HASHES = {'holders', 'frames', 'requests', 'attempts', 'deaths', 'counters', 'totals'}
local COUNTERS = {'put', 'duplicate', 'unknown', 'full', 'lease_expired', 'failed', 'dead', 'deaths', 'rejected_frames', 'returned'}
local MOST_NUMBER, MOST_TEXT = 2 ^ 53, 1000000
local EMPTY_CHAIN = '0000000000000000000000000000000000000000'
local GIVEN_UP = 'given up: '
local DEAD_LETTERS, DEAD_LETTER_BYTES = 100, 65536
local ALONE = 2 -- a ticket is leased alone for the last deaths before it is given up

-- The server provides neither redis.call nor string while it loads the library.
local function call(...) return redis.call(...) end

-- The places whose keys have a wrong type.
local function wrong_types(k)
  local wrong = {}
  for _, place in ipairs(ZSETS) do
    if type(redis.pcall('ZSCORE', k[place], '1')) == 'table' then wrong[#wrong + 1] = place end
  end
  for _, place in ipairs(HASHES) do
    if type(redis.pcall('HEXISTS', k[place], '1')) == 'table' then wrong[#wrong + 1] = place end
  end
  return wrong
end

-- `while_wrong` makes the reply while a key has a wrong type; a recovery corrects the effects of the aborted call.
local function register(name, flags, body, while_wrong)
  local function callback(keys, args)
    local k = {}
    for i, place in ipairs(PLACES) do k[place] = keys[i] end
    if not while_wrong then return body(k, args) end
    local went_well, reply = pcall(body, k, args)
    if went_well then return reply end
    local text = type(reply) == 'table' and reply.err or tostring(reply)
    if not string.find(text, 'WRONGTYPE', 1, true) then error{err = string.gsub(text, '^user_[%w_]+:%d+: ', '')} end
    return while_wrong(k, text)
  end
  redis.register_function{function_name = 'asyncrl_@DIGEST@_' .. name, flags = flags, callback = callback}
end

local function meta(k, field) return tonumber(call('HGET', k.meta, field) or '0') end
local function id_text(id) return string.format('%d', id) end

-- The number in a text that a generator may have written, or 0 if it is not a whole number >= 0.
local function whole(text)
  local number = tonumber(text or '') or 0
  return number >= 0 and number <= MOST_NUMBER and math.floor(number) == number and number or 0
end

local function total(k, field) return whole(call('HGET', k.totals, field)) end
local function issued_so_far(k) return math.max(math.min(total(k, 'issued'), meta(k, 'most')), meta(k, 'watermark')) end
local function lowest(zset) return tonumber(call('ZRANGE', zset, 0, 0)[1]) end

-- HINCRBY for a field that may hold any text. Returns the new value.
local function add(hash, field, n)
  local now = math.max(whole(call('HGET', hash, field)) + n, 0)
  if now > MOST_NUMBER then now = n end
  call('HSET', hash, field, id_text(now))
  return now
end

local function count(k, counter, n) if n ~= 0 then add(k.counters, counter, n) end end

-- Writes a number if the field has another one: a poll that changes nothing leaves nothing in the server's log.
local function set(hash, field, number)
  if call('HGET', hash, field) ~= id_text(number) then call('HSET', hash, field, id_text(number)) end
end

local function ids_in(text)
  local ids = {}
  for id in string.gmatch(text, '%d+') do ids[#ids + 1] = id end
  return ids
end

local function now_ms()
  local time = call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

-- The oldest unfinished id, or the next id to be issued.
local function anchor(k)
  return math.min(lowest(k.leased) or math.huge, lowest(k.reissue) or math.huge, issued_so_far(k) + 1)
end

-- Calls `visit` with many ids at a time; Lua passes at most a few thousand values.
local function each_batch(ids, visit)
  for first = 1, #ids, 1000 do visit(unpack(ids, first, math.min(first + 999, #ids))) end
end

local function is_done(k, id) return tonumber(id) <= meta(k, 'watermark') or call('SISMEMBER', k.done, id) == 1 end

-- Whether `id` is the id of a ticket that may be under way, in this library's spelling.
local function is_id(k, id, issued)
  local number = tonumber(id)
  return number and number > 0 and number <= issued and id_text(number) == id and not is_done(k, id)
end

local function assignment(k, number)
  local text = call('HGET', k.takes, number)
  if not text then return nil end
  local previous, chain, unshortened, ids = string.match(text, '^(%x+) (%x+) (%S+) ?(.*)$')
  return {previous = previous, chain = chain, unshortened = unshortened, ids = ids_in(ids)}
end

local function has_frame(k, id) return call('HEXISTS', k.frames, id) == 1 end

-- Whether the group of `id` is stored: it is ready, or in a take. A frame alone does not prove it, because PUT writes the
-- frame first, and the frame stays if the store has lost these functions.
local function is_handed_over(k, id)
  if call('ZSCORE', k.ready, id) then return true end
  for _, n in ipairs(has_frame(k, id) and call('HKEYS', k.takes) or {}) do
    for _, taken in ipairs(assignment(k, n).ids) do
      if taken == id then return true end
    end
  end
  return false
end

local function unlease(k, id)
  call('ZREM', k.leased, id)
  call('ZREM', k.deadlines, id)
  call('HDEL', k.holders, id)
end

local function issue_again(k, id) -- an id under way
  unlease(k, id)
  call('ZADD', k.reissue, id, id)
end

-- Issues `ids` again, whose holder died or lost its lease; returns their number. Drops members that are not such ids.
local function lost_by_holder(k, ids)
  local lost, issued = 0, issued_so_far(k)
  for _, id in ipairs(ids) do
    if is_id(k, id, issued) and not is_handed_over(k, id) then
      add(k.deaths, id, 1)
      issue_again(k, id)
      lost = lost + 1
    else
      unlease(k, id)
    end
  end
  count(k, 'deaths', lost)
  return lost
end

-- The members of `ids` that `holder` has leased.
local function held(k, holder, ids)
  local found = {}
  for _, id in ipairs(ids) do
    if call('HGET', k.holders, id) == holder then found[#found + 1] = id end
  end
  return found
end

-- Counts a failed attempt, unless `most` is empty. Returns true if the ticket is dead now; else issues the id again.
local function is_last_attempt(k, id, most)
  if most == '' or add(k.attempts, id, 1) < tonumber(most) then return issue_again(k, id) end
  count(k, 'dead', 1)
  return true
end

-- Makes `id`, whose frame is stored, ready.
local function make_ready(k, id)
  unlease(k, id)
  call('ZREM', k.reissue, id)
  call('HDEL', k.deaths, id)
  add(k.totals, 'bytes', call('HSTRLEN', k.frames, id))
  call('ZADD', k.ready, id, id)
end

local function drop_frames(k, ids)
  local freed = 0
  for _, id in ipairs(ids) do freed = freed + call('HSTRLEN', k.frames, id) end
  each_batch(ids, function(...) call('HDEL', k.frames, ...) end)
  add(k.totals, 'bytes', -freed)
end

-- Whether a frame is the reason for which a ticket was given up.
local function given_up(frame) return string.sub(frame, 1, #GIVEN_UP) == GIVEN_UP end

-- Adds a dead letter: the reason, and the beginning of the frame if there was one.
local function lay_aside(k, id, reason, frame)
  call('LPUSH', k.dead_letters, id .. ' ' .. reason .. '\n' .. string.sub(frame, 1, DEAD_LETTER_BYTES))
  call('LTRIM', k.dead_letters, 0, DEAD_LETTERS - 1)
end

-- Writes take `number`; returns its chain.
local function assign(k, number, previous, ids, unshortened)
  local text = table.concat(ids, ' ')
  local chain = redis.sha1hex(previous .. ' ' .. text)
  call('HSET', k.takes, number, previous .. ' ' .. chain .. ' ' .. unshortened .. ' ' .. text)
  call('HSET', k.meta, 'last', number, 'chain', chain)
  return chain
end

-- The first two arguments of the learner's functions are its epoch and its name. A store behind that epoch was rolled
-- back or wiped; a store ahead of it, or with another owner, has another learner.
local function stranger(k, args)
  local epoch = meta(k, 'epoch')
  if epoch < tonumber(args[1]) then
    return {'GAP', 'the store is at epoch ' .. epoch .. ', this learner at ' .. args[1] .. ': it was rolled back or wiped'}
  end
  if epoch > tonumber(args[1]) or call('HGET', k.meta, 'owner') ~= args[2] then
    return {'FENCED', 'this learner recovered as epoch ' .. args[1] .. ', the store is at ' .. epoch}
  end
end

-- The HSETNX changes nothing. It ends the call of a user without the right to write meta before any effect.
local function register_privileged(name, body, while_wrong)
  register(name, {'allow-oom'}, function(k, args)
    call('HSETNX', k.meta, 'epoch', 0)
    return body(k, args)
  end, while_wrong)
end

local function register_for_learner(name, body)
  register_privileged(name, function(k, args) return stranger(k, args) or body(k, args) end, function(k, text)
    return {'GAP', 'a key of this lane was replaced by one of another type: ' .. text}
  end)
end

local function expire(k)
  count(k, 'lease_expired', lost_by_holder(k, call('ZRANGEBYSCORE', k.deadlines, '-inf', now_ms())))
end

-- The ids that an earlier call with this `request` leased and `holder` still has; nil if there was none.
local function repeated(k, holder, request)
  local ids = ids_in(string.sub(call('HGET', k.requests, holder) or '', 1, MOST_TEXT))
  if table.remove(ids, 1) ~= request then return nil end
  return held(k, holder, ids)
end

-- The suspects and their deaths. A suspect is leased alone, which shows whether it kills its holder, or was only held at
-- the same time as a ticket that does.
local function suspects(k, most)
  local found, counts = {}, call('HGETALL', k.deaths)
  for i = 1, #counts, 2 do
    local deaths = whole(counts[i + 1])
    if deaths >= math.max(most - ALONE, 1) then found[counts[i]] = deaths end
  end
  return found
end

-- The ids that `holder` may lease while there are suspects: none if it has a suspect, a suspect if it has no ticket. Nil if
-- no suspect waits.
local function alone(k, holder, suspected, limit, most)
  local first, issued = nil, issued_so_far(k)
  for id, deaths in pairs(suspected) do
    if call('HGET', k.holders, id) == holder then return {} end
    local waits = deaths < most and is_id(k, id, issued) and tonumber(id) <= limit and call('ZSCORE', k.reissue, id)
    if waits and tonumber(id) < (tonumber(first) or math.huge) then first = id end
  end
  if not first then return nil end
  local holders = call('HGETALL', k.holders)
  for i = 2, #holders, 2 do
    if holders[i] == holder then return {} end
  end
  return {first}
end

-- Up to `wanted` ids that wait to be issued again, without suspects. Drops members that are not such ids.
local function waiting(k, limit, wanted, suspected)
  local skipped, ids, issued = 0, {}, issued_so_far(k)
  for _ in pairs(suspected) do skipped = skipped + 1 end
  for _, id in ipairs(call('ZRANGEBYSCORE', k.reissue, '-inf', limit, 'LIMIT', 0, wanted + skipped)) do
    if not is_id(k, id, issued) or is_handed_over(k, id) then call('ZREM', k.reissue, id)
    elseif not suspected[id] and #ids < wanted then ids[#ids + 1] = id end
  end
  return ids
end

local function credit(k) return meta(k, 'version'), meta(k, 'limit'), meta(k, 'closed'), call('HGET', k.meta, 'history') or '' end

local function nothing_to_lease(k)
  local version, limit, closed, history = credit(k)
  return {version, limit, closed, {}, history}
end

-- lease holder count lease_ms request max_deaths -> version, limit, closed, ids, history
register('lease', {}, function(k, args)
  local holder, wanted, request, most = args[1], tonumber(args[2]), args[4], tonumber(args[5])
  local version, limit, closed, history = credit(k)
  expire(k)
  local again = repeated(k, holder, request)
  if again or closed == 1 then return {version, limit, closed, again or {}, history} end
  local suspected, issued = suspects(k, most), issued_so_far(k)
  local ids = alone(k, holder, suspected, limit, most)
  if not ids then
    ids = waiting(k, limit, wanted, suspected)
    while #ids < wanted and issued < limit do
      issued = issued + 1
      local id = id_text(issued)
      -- A generator can lower the number of issued ids; even then no id is issued twice.
      if not (is_done(k, id) or call('ZSCORE', k.leased, id) or call('ZSCORE', k.reissue, id) or is_handed_over(k, id)) then
        ids[#ids + 1] = id
      end
    end
  end
  local ends_ms = now_ms() + tonumber(args[3])
  for _, id in ipairs(ids) do
    call('ZREM', k.reissue, id)
    call('ZADD', k.leased, id, id)
    call('ZADD', k.deadlines, ends_ms, id)
    call('HSET', k.holders, id, holder)
  end
  set(k.totals, 'issued', issued)
  if #ids > 0 then call('HSET', k.requests, holder, request .. ' ' .. table.concat(ids, ' ')) end
  return {version, limit, closed, ids, history}
end, nothing_to_lease)

-- renew holder lease_ms ids
register('renew', {'allow-oom'}, function(k, args)
  local ends_ms = now_ms() + tonumber(args[2])
  for _, id in ipairs(held(k, args[1], ids_in(args[3]))) do call('ZADD', k.deadlines, ends_ms, id) end
end, function() return 0 end)

local function put_outcome(k, id, bytes, max_bytes)
  if is_done(k, id) then return 'duplicate' end
  if tonumber(id) > issued_so_far(k) then return 'unknown' end
  if not (call('ZSCORE', k.leased, id) or call('ZSCORE', k.reissue, id)) then return 'duplicate' end
  if total(k, 'bytes') + bytes <= max_bytes then return 'stored' end
  -- Younger groups may fill the store while the learner waits for the oldest, so refusing the oldest would be a deadlock.
  -- If no generator has the oldest, refusing any group would be one, because a generator that keeps a group leases nothing.
  expire(k)
  local oldest = anchor(k)
  local is_awaited = tonumber(id) == oldest or call('ZSCORE', k.reissue, oldest)
  return meta(k, 'starving') == 1 and is_awaited and 'stored' or 'full'
end

-- offer id bytes max_bytes -> the outcome that put would have
register('offer', {}, function(k, args)
  local outcome = put_outcome(k, args[1], tonumber(args[2]), tonumber(args[3]))
  if outcome == 'full' then count(k, 'full', 1) end
  return outcome
end, function() return 'full' end)

-- put id max_bytes -> outcome; always after  HSETNX frames id frame  in one transaction, because Lua would hash every byte
-- of an argument
register('put', {}, function(k, args)
  local id = args[1]
  local outcome = put_outcome(k, id, call('HSTRLEN', k.frames, id), tonumber(args[2]))
  if outcome == 'stored' then make_ready(k, id)
  elseif outcome ~= 'duplicate' or is_done(k, id) then call('HDEL', k.frames, id) end
  count(k, outcome == 'stored' and 'put' or outcome, 1)
  return outcome
end, function() return 'full' end)

-- give_back holder ids
register('give_back', {'allow-oom'}, function(k, args)
  local ids = held(k, args[1], ids_in(args[2]))
  for _, id in ipairs(ids) do issue_again(k, id) end
  count(k, 'returned', #ids)
end, function() return 0 end)

-- fail holder id tombstone max_attempts -> 1 if that was the last attempt
register('fail', {'allow-oom'}, function(k, args)
  local id, most = args[2], tonumber(args[4])
  if call('HGET', k.holders, id) ~= args[1] then
    local attempts = whole(call('HGET', k.attempts, id))
    return (attempts >= most and call('HEXISTS', k.frames, id) == 1) and 1 or 0
  end
  count(k, 'failed', 1)
  if not is_last_attempt(k, id, most) then return 0 end
  call('HSET', k.frames, id, args[3])
  make_ready(k, id)
  return 1
end, function() return 0 end)

-- Undoes the takes from `number` on; their groups are ready again.
local function unassign_from(k, number)
  for later = meta(k, 'last'), number, -1 do
    local undone = assignment(k, later)
    for _, id in ipairs(undone.ids) do call('ZADD', k.ready, id, id) end
    call('HDEL', k.takes, later)
    call('HSET', k.meta, 'last', later - 1, 'chain', undone.previous)
  end
end

-- Gives up the tickets with `most` deaths or more; the learner gets them in order, as dead groups.
local function bury(k, most)
  local counts, issued = call('HGETALL', k.deaths), issued_so_far(k)
  for i = 1, #counts, 2 do
    local id, deaths = counts[i], whole(counts[i + 1])
    if not is_id(k, id, issued) then call('HDEL', k.deaths, id)
    elseif deaths >= most and call('ZSCORE', k.reissue, id) and not is_handed_over(k, id) then
      local reason = 'deadly: ' .. deaths .. ' generators died, or lost their lease, while they had this ticket'
      lay_aside(k, id, reason, '')
      call('HSET', k.frames, id, GIVEN_UP .. reason)
      make_ready(k, id)
      count(k, 'dead', 1)
    end
  end
end

-- The lowest `wanted` ready ids, in order. Drops other members, which a recovery puts into their place.
local function ready_ids(k, wanted)
  local members, ids, issued = call('ZRANGE', k.ready, 0, wanted - 1, 'WITHSCORES'), {}, issued_so_far(k)
  if #members < 2 * wanted then return ids end
  for i = 1, #members, 2 do
    local id = members[i]
    local fits = is_id(k, id, issued) and tonumber(members[i + 1]) == tonumber(id) and has_frame(k, id)
    if fits then ids[#ids + 1] = id else call('ZREM', k.ready, id) end
  end
  return ids
end

-- Whether some of `ids` belong to a take; drops these from `ready`. Reads every id of all takes.
local function were_taken(k, ids)
  local is_candidate, found = {}, false
  for _, id in ipairs(ids) do is_candidate[id] = true end
  for _, n in ipairs(call('HKEYS', k.takes)) do
    for _, id in ipairs(assignment(k, n).ids) do
      if is_candidate[id] then
        call('ZREM', k.ready, id)
        found = true
      end
    end
  end
  return found
end

-- take epoch owner number previous count window max_deaths -> OK chain ids | WAIT
register_for_learner('take', function(k, args)
  local number, previous, wanted, window = tonumber(args[3]), args[4], tonumber(args[5]), tonumber(args[6])
  local before = assignment(k, number)
  if before and before.previous == previous then
    if #before.ids <= wanted then return {'OK', before.chain, before.ids} end
    unassign_from(k, number) -- assigned for a larger batch, before a restart with a smaller one
  end
  if number ~= meta(k, 'last') + 1 or (call('HGET', k.meta, 'chain') or EMPTY_CHAIN) ~= previous then
    return {'GAP', 'take ' .. number .. ' does not follow the take ' .. meta(k, 'last') .. ' of the store'}
  end
  bury(k, tonumber(args[7]))
  local ids = ready_ids(k, wanted)
  -- A waiting learner calls every few milliseconds, so the takes are read last, only if these ids would be assigned.
  local waits = #ids < wanted or tonumber(ids[wanted]) >= anchor(k) + window or were_taken(k, ids)
  set(k.meta, 'starving', waits and 1 or 0)
  if waits then return {'WAIT'} end
  call('ZREMRANGEBYRANK', k.ready, 0, wanted - 1)
  return {'OK', assign(k, number, previous, ids, '-'), ids}
end)

-- reject epoch owner number chain id digest reason max_attempts|'' -> OK chain ids, of the take without the id, or with
-- the reason in place of its frame. Another frame stays: it was stored after the store had lost the rejected one.
register_for_learner('reject', function(k, args)
  local number, chain, rejected = tonumber(args[3]), args[4], args[5]
  local take = assignment(k, number)
  if not take or (chain ~= take.chain and chain ~= take.unshortened) then
    return {'GAP', 'the store does not know take ' .. number .. ' with this chain'}
  end
  local ids = {}
  for _, id in ipairs(take.ids) do
    if id ~= rejected then ids[#ids + 1] = id end
  end
  local frame = call('HGET', k.frames, rejected)
  local is_another = not frame or given_up(frame) or redis.sha1hex(frame) ~= args[6]
  if chain ~= take.chain or #ids == #take.ids or is_another then return {'OK', take.chain, take.ids} end
  lay_aside(k, rejected, args[7], frame)
  drop_frames(k, {rejected})
  count(k, 'rejected_frames', 1)
  -- Without the id the take would have another chain than the one that later takes continue, so there is no next attempt.
  -- Lost weights are known by their name, also in a repeated take, so these takes may be undone for them.
  if args[8] == '' then unassign_from(k, number + 1) end
  local most = number == meta(k, 'last') and args[8] or 0
  if not is_last_attempt(k, rejected, most) then return {'OK', assign(k, number, take.previous, ids, chain), ids} end
  call('HSET', k.frames, rejected, GIVEN_UP .. args[7])
  add(k.totals, 'bytes', #GIVEN_UP + #args[7])
  return {'OK', take.chain, take.ids}
end)

local function weight(k)
  local bytes = 0
  for _, id in ipairs(call('HKEYS', k.frames)) do bytes = bytes + call('HSTRLEN', k.frames, id) end
  return bytes
end

-- commit epoch owner number chain -> OK groups
register_for_learner('commit', function(k, args)
  local number, committed = tonumber(args[3]), meta(k, 'committed')
  if number <= committed then return {'OK', 0} end
  local takes = {}
  for n = committed + 1, number do takes[n] = assignment(k, n) or {} end
  if takes[number].chain ~= args[4] then return {'GAP', 'the store does not know take ' .. number .. ' with this chain'} end
  local groups = 0
  for n = committed + 1, number do
    local ids = takes[n].ids
    drop_frames(k, ids)
    each_batch(ids, function(...) call('HDEL', k.attempts, ...) call('HDEL', k.deaths, ...) call('SADD', k.done, ...) end)
    call('HDEL', k.takes, n)
    groups = groups + #ids
  end
  local watermark = meta(k, 'watermark')
  while call('SREM', k.done, id_text(watermark + 1)) == 1 do watermark = watermark + 1 end
  call('HSET', k.meta, 'committed', number, 'watermark', watermark)
  call('HSET', k.totals, 'bytes', id_text(weight(k)))
  return {'OK', groups}
end)

-- Deletes the takes that do not continue the ledger's chain without a gap, or that lack a group. Returns the ids of the
-- kept takes, the last number and its chain.
local function keep_takes(k, number, chain)
  local kept, after = {}, {}
  while true do
    local take = assignment(k, number + 1)
    local whole = take ~= nil and take.previous == chain
    for _, id in ipairs(whole and take.ids or {}) do
      if is_done(k, id) or call('HEXISTS', k.frames, id) == 0 then whole = false end
    end
    if not whole then break end
    number, chain = number + 1, take.chain
    after[number] = true
    for _, id in ipairs(take.ids) do kept[id] = true end
  end
  for _, n in ipairs(call('HKEYS', k.takes)) do
    if not after[tonumber(n)] then call('HDEL', k.takes, n) end
  end
  return kept, number, chain
end

-- Deletes the fields of `hash` whose id is done or was never issued, such as frames of a PUT without functions.
local function forget_obsolete(k, hash, issued)
  local obsolete = {}
  for _, id in ipairs(call('HKEYS', hash)) do
    if not is_id(k, id, issued) then obsolete[#obsolete + 1] = id end
  end
  each_batch(obsolete, function(...) call('HDEL', hash, ...) end)
end

-- The leases of ids under way, which end at most `lease_ms` from now: id -> {holder, end}.
local function sound_leases(k, issued, lease_ms)
  local leases, longest_ms, holders = {}, now_ms() + lease_ms, call('HGETALL', k.holders)
  for i = 1, #holders, 2 do
    local id = holders[i]
    local ends_ms = is_id(k, id, issued) and not has_frame(k, id) and tonumber(call('ZSCORE', k.deadlines, id) or '')
    if ends_ms then leases[id] = {holders[i + 1], math.min(ends_ms, longest_ms)} end
  end
  return leases
end

-- Puts every id above the watermark into its one place and counts the bytes again; O(ids in flight). Trusts no content
-- of these places.
local function rebuild(k, kept, watermark, issued, lease_ms)
  for _, hash in ipairs{k.frames, k.attempts, k.deaths} do forget_obsolete(k, hash, issued) end
  local leases = sound_leases(k, issued, lease_ms)
  call('DEL', k.ready, k.reissue, k.leased, k.deadlines, k.holders)
  for n = watermark + 1, issued do
    local id = id_text(n)
    if has_frame(k, id) then
      call('HDEL', k.deaths, id)
      if not kept[id] then call('ZADD', k.ready, id, id) end
    elseif leases[id] then
      call('ZADD', k.leased, id, id)
      call('ZADD', k.deadlines, leases[id][2], id)
      call('HSET', k.holders, id, leases[id][1])
    elseif not is_done(k, id) then
      call('ZADD', k.reissue, id, id)
    end
  end
  call('HSET', k.totals, 'issued', id_text(issued), 'bytes', id_text(weight(k)))
end

-- Sets counters that are not numbers to 0, and deletes unknown ones.
local function sound_counters(k)
  local counted = call('HMGET', k.counters, unpack(COUNTERS))
  call('DEL', k.counters)
  for i, name in ipairs(COUNTERS) do count(k, name, whole(counted[i])) end
end

-- recover known_epoch owner is_first takes chain version limit watermark "id id ..." history lease_ms -> OK epoch | NEWER epoch
-- A learner's first recovery must follow the newest epoch, and later ones its own. So a delayed call of a learner that
-- has died since cannot take the lane from another one.
register_privileged('recover', function(k, args)
  local epoch, known, watermark = meta(k, 'epoch'), tonumber(args[1]), tonumber(args[8])
  if call('HGET', k.meta, 'owner') ~= args[2] then
    if known < epoch or (known == epoch and args[3] == '0') then return {'NEWER', epoch} end
    epoch = known + 1
  end
  for _, place in ipairs(wrong_types(k)) do call('DEL', k[place]) end
  local above, limit = ids_in(args[9]), tonumber(args[7])
  local most = math.max(meta(k, 'most'), limit, watermark)
  for _, id in ipairs(above) do most = math.max(most, tonumber(id)) end
  call('HSET', k.meta, 'epoch', epoch, 'owner', args[2], 'version', args[6], 'limit', args[7], 'closed', 0, 'starving', 0,
       'history', args[10], 'watermark', watermark, 'committed', args[4], 'most', most)
  call('DEL', k.done)
  local issued = issued_so_far(k)
  for _, id in ipairs(above) do
    call('SADD', k.done, id)
    issued = math.max(issued, tonumber(id))
  end
  local kept, last, chain = keep_takes(k, tonumber(args[4]), args[5])
  for id in pairs(kept) do issued = math.max(issued, tonumber(id)) end
  call('HSET', k.meta, 'last', last, 'chain', chain)
  sound_counters(k)
  rebuild(k, kept, watermark, issued, tonumber(args[11]))
  return {'OK', epoch}
end)

-- version epoch owner version limit waiting -> OK
register_for_learner('version', function(k, args)
  if args[5] == '1' then set(k.meta, 'starving', 1) end
  set(k.meta, 'version', math.max(meta(k, 'version'), args[3]))
  set(k.meta, 'limit', math.max(meta(k, 'limit'), args[4]))
  set(k.meta, 'most', math.max(meta(k, 'most'), args[4]))
  return {'OK'}
end)

-- revoke holder -> ids issued again
register_privileged('revoke', function(k, args)
  local lost = lost_by_holder(k, held(k, args[1], call('HKEYS', k.holders)))
  call('HDEL', k.requests, args[1])
  count(k, 'returned', lost)
  return lost
end, function() return 0 end) -- the leases expire

-- close epoch owner -> OK
register_for_learner('close', function(k, args)
  call('HSET', k.meta, 'closed', 1)
  return {'OK'}
end)

-- audit -> issued leased reissue ready taken done bytes, counters
register('audit', {'no-writes'}, function(k)
  local taken = 0
  for _, n in ipairs(call('HKEYS', k.takes)) do taken = taken + #assignment(k, n).ids end
  local counted = call('HMGET', k.counters, unpack(COUNTERS))
  for i in ipairs(COUNTERS) do counted[i] = whole(counted[i]) end
  return {issued_so_far(k), call('ZCARD', k.leased), call('ZCARD', k.reissue), call('ZCARD', k.ready), taken,
          meta(k, 'watermark') + call('SCARD', k.done), total(k, 'bytes'), COUNTERS, counted}
end, function() return {1, 0, 0, 0, 0, 0, 0, {}, {}} end) -- a place that cannot be read counts as a missing id

-- letters -> "id reason", newest first
register('letters', {'no-writes'}, function(k)
  local letters = call('LRANGE', k.dead_letters, 0, -1)
  for i, letter in ipairs(letters) do letters[i] = string.match(letter, '^[^\n]*') end
  return letters
end)
