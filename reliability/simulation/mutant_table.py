"""The mutants: one line each, in the order of functions.lua, then the client. See `mutants.py`."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Edit:
    """Replace the first `old` after `after` by `new`."""

    path: str
    old: str
    new: str
    after: str = ""

    def apply(self, root: Path) -> None:
        """Raises LookupError when the text is not there."""
        file = root / self.path
        text = file.read_text()
        start = text.find(self.after)
        found = text.find(self.old, start)
        if start < 0 or found < 0:
            raise LookupError(
                f"{self.path} no longer contains {self.old!r} after {self.after!r}: renew this mutant"
            )
        file.write_text(text[:found] + self.new + text[found + len(self.old) :])


@dataclass(frozen=True, slots=True)
class Mutant:
    what: str
    edits: tuple[Edit, ...]
    survives: str = ""
    """Why the simulation cannot notice, where it does not."""


def lua(old: str, new: str, after: str = "") -> Edit:
    return Edit("asyncrl/buffer/functions.lua", old, new, after)


def client(module: str, old: str, new: str, after: str = "") -> Edit:
    return Edit(f"asyncrl/buffer/{module}.py", old, new, after)


def launch(module: str, old: str, new: str) -> Edit:
    return Edit(f"asyncrl/launch/{module}.py", old, new)


def control(module: str, old: str, new: str) -> Edit:
    return Edit(f"asyncrl/control/{module}.py", old, new)


def lineage(old: str, new: str, after: str = "") -> Edit:
    return Edit("asyncrl/lineage.py", old, new, after)


def loop(old: str, new: str, after: str = "") -> Edit:
    """In the simulation's loops, which stand for learner.py and generator.py."""
    return Edit("reliability/simulation/processes.py", old, new, after)


def one(what: str, edit: Edit, survives: str = "") -> Mutant:
    return Mutant(what, (edit,), survives)


def two(what: str, first: Edit, second: Edit, survives: str = "") -> Mutant:
    return Mutant(what, (first, second), survives)


TAKE_CHAIN = lua("(call('HGET', k.meta, 'chain') or EMPTY_CHAIN) ~= previous", "false")
TAKE_NUMBER = lua("number ~= meta(k, 'last') + 1 or", "")
AGAIN_CHAIN = lua("before and before.previous == previous", "before")
COMMIT_CHAIN = lua("takes[number].chain ~= args[4]", "takes[number].chain == nil")
REJECT_CHAIN = lua("(chain ~= take.chain and chain ~= take.unshortened)", "false")
KEEP_CHAIN = lua("take ~= nil and take.previous == chain", "take ~= nil")
FENCE_OWNER = lua("or call('HGET', k.meta, 'owner') ~= args[2] then", "then")
FENCE_EPOCH = lua("epoch > tonumber(args[1]) or ", "")
NEW_EPOCH = lua("epoch = known + 1", "epoch = known")
REPEATED_IDS = client("ledger", "if repeated or len(set(ids)) != len(ids):", "if False:")
HEAL = client("intake", "        self.recover(version)\n", "        pass\n", after="def _heal")
MEND = client("watch", "            recover()\n", "            pass\n")
OPEN_WAITING = client("intake", "self.open(version)\n                return None", "return None")
OPEN_REJECTED = client(
    "intake", "if step.rejected:\n            self.open(version)", "if False:\n            self.open(version)"
)

MUTANTS = [
    # -- moves of an id
    one("done ids above the watermark are forgotten", lua(" or call('SISMEMBER', k.done, id) == 1", "", after="local function is_done")),
    one("done ids below the watermark are forgotten", lua("tonumber(id) <= meta(k, 'watermark') or ", "", after="local function is_done")),
    one("a lease keeps its holder", lua("  call('HDEL', k.holders, id)\n", "", after="local function unlease")),
    one("a lease keeps its deadline", lua("  call('ZREM', k.deadlines, id)\n", "", after="local function unlease")),
    one("an id is not issued again", lua("  call('ZADD', k.reissue, id, id)\n", "", after="local function issue_again")),
    one("anybody may give back or renew anything", lua("call('HGET', k.holders, id) == holder", "call('HGET', k.holders, id)")),
    one("one attempt too many", lua("< tonumber(most) then", "<= tonumber(most) then")),
    one("one attempt too few", lua("< tonumber(most) then", "< tonumber(most) - 1 then")),
    one("a late group stays to be issued again", lua("  call('ZREM', k.reissue, id)\n", "", after="local function make_ready")),
    one("bytes of a stored group are not counted", lua("  add(k.totals, 'bytes', call('HSTRLEN', k.frames, id))\n", "")),
    one("bytes of a forgotten group still count", lua("  add(k.totals, 'bytes', -freed)\n", "")),
    one("the chain does not contain its past", lua("redis.sha1hex(previous .. ' ' .. text)", "redis.sha1hex(text)")),
    # -- leases
    one("leases never end", lua("'-inf', now_ms())", "'-inf', 0)")),
    one("leases end at once", lua("'-inf', now_ms())", "'-inf', '+inf')")),
    one("a lease asked for again is another lease", lua("if again or closed == 1", "if closed == 1")),
    one("any lease is the one asked for before", lua("if table.remove(ids, 1) ~= request then return nil end", "table.remove(ids, 1)")),
    one("a lease asked for again names lost tickets", lua("return held(k, holder, ids)", "return ids", after="local function repeated")),
    one("leased after the end", lua("if again or closed == 1", "if again")),
    one("leased one beyond the credit", lua("#ids < wanted and issued < limit", "#ids < wanted and issued <= limit")),
    one("leased again beyond the credit", lua("call('ZRANGEBYSCORE', k.reissue, '-inf', limit,", "call('ZRANGEBYSCORE', k.reissue, '-inf', '+inf',")),
    one("leased in two places", lua("    call('ZREM', k.reissue, id)\n", "", after="register('lease'")),
    one("the holder of a lease is not noted", lua("    call('HSET', k.holders, id, holder)\n", "")),
    one("what was leased is not noted as issued", lua("  set(k.totals, 'issued', issued)\n", "", after="register('lease'")),
    one("a renewal renews nothing", lua("call('ZADD', k.deadlines, ends_ms, id) end", "end", after="register('renew'")),
    # -- groups
    one("a group that is done is unknown", lua("if is_done(k, id) then return 'duplicate' end", "if is_done(k, id) then return 'unknown' end")),
    one("a group that is there is stored again", lua("if not (call('ZSCORE', k.leased, id) or call('ZSCORE', k.reissue, id)) then return 'duplicate' end", "")),
    two("a group that is done or there is stored again", lua("if is_done(k, id) then return 'duplicate' end", ""), lua("if not (call('ZSCORE', k.leased, id) or call('ZSCORE', k.reissue, id)) then return 'duplicate' end", "")),
    one("a late group is refused", lua("(call('ZSCORE', k.leased, id) or call('ZSCORE', k.reissue, id))", "call('ZSCORE', k.leased, id)")),
    one("a group of an unknown id is kept", lua("if tonumber(id) > issued_so_far(k) then return 'unknown' end", "")),
    one("no cap on bytes", lua("if total(k, 'bytes') + bytes <= max_bytes then", "if true then")),
    one("a full store refuses the awaited group", lua("meta(k, 'starving') == 1 and is_awaited and 'stored' or 'full'", "'full'")),
    one("a full store takes any group that comes while the learner waits", lua("starving') == 1 and is_awaited and", "starving') == 1 and")),
    one("a full store takes the oldest though nobody waits", lua("meta(k, 'starving') == 1 and is_awaited", "is_awaited")),
    one("a full store waits for a group that nobody has", lua("local is_awaited = tonumber(id) == oldest or call('ZSCORE', k.reissue, oldest)", "local is_awaited = tonumber(id) == oldest")),
    one("a full store waits for the dead", lua("  expire(k)\n  local oldest", "  local oldest")),
    one("a refused frame stays", lua("elseif outcome ~= 'duplicate' or is_done(k, id) then", "elseif is_done(k, id) then")),
    one("a duplicate takes the frame away", lua("elseif outcome ~= 'duplicate' or is_done(k, id) then", "else")),
    one("the frame of a duplicate of a done id stays", lua("outcome ~= 'duplicate' or is_done(k, id)", "outcome ~= 'duplicate'")),
    one("anybody's failure counts", lua("if call('HGET', k.holders, id) ~= args[1] then", "if not call('HGET', k.holders, id) then")),
    one("a dead ticket has no tombstone", lua("  call('HSET', k.frames, id, args[3])\n", "", after="register('fail'")),
    one("a duplicate replaces the frame", client("redis", "transaction.hsetnx(self._frames_key, str(ticket_id), frame)", "transaction.hset(self._frames_key, str(ticket_id), frame)")),
    # -- takes
    one("a take asked for again is assigned anew", lua("if #before.ids <= wanted then return {'OK', before.chain, before.ids} end", "")),
    one("a take of another history is repeated", AGAIN_CHAIN),
    two("a take of another history is kept and repeated", AGAIN_CHAIN, KEEP_CHAIN),
    one("takes need not follow by number", TAKE_NUMBER,
        survives="the chain of the last take is compared as well, and no two takes of a history have the same"),
    one("takes need not follow by chain", TAKE_CHAIN),
    two("takes need not follow at all", TAKE_NUMBER, TAKE_CHAIN),
    two("no chain in TAKE", AGAIN_CHAIN, TAKE_CHAIN),
    one("the window is one too large", lua("tonumber(ids[wanted]) >= anchor(k) + window", "tonumber(ids[wanted]) > anchor(k) + window")),
    one("no window", lua("#ids < wanted or tonumber(ids[wanted]) >= anchor(k) + window", "#ids < wanted")),
    one("the anchor overlooks what waits to be issued again", lua("lowest(k.reissue) or math.huge, ", "")),
    one("the anchor overlooks what is leased", lua("lowest(k.leased) or math.huge, ", "")),
    one("taken groups stay ready", lua("  call('ZREMRANGEBYRANK', k.ready, 0, wanted - 1)\n", "")),
    one("the learner never waits", lua("'starving', waits and 1 or 0)", "'starving', 0)")),
    one("the learner always waits", lua("'starving', waits and 1 or 0)", "'starving', 1)")),
    # -- frames that are refused
    one("any take may be shortened", REJECT_CHAIN),
    one("a frame is refused twice", lua(" or #ids == #take.ids or is_another", " or #ids == #take.ids")),
    one("a refused frame still belongs to its take", lua("  drop_frames(k, {rejected})\n", "")),
    one("a refused frame costs no attempt", lua("not is_last_attempt(k, rejected, most)", "issue_again(k, rejected) == nil")),
    one("another frame is refused than was seen", lua(" or redis.sha1hex(frame) ~= args[6]", "")),
    one("a refused frame is not refused", client("judge", '                buffer.reject_frame(take, ticket_id, frame, f"{DEAD}: undecodable: {error}")\n', "")),
    one("a group under another id is trained", client("judge", "if (group.lane, group.ticket_id) != (self.lane, name):", "if False:")),
    # -- commits
    one("a commit is made twice", lua("if number <= committed then return {'OK', 0} end", "")),
    one("a commit of another history", COMMIT_CHAIN),
    two("a commit of another history, takes too", COMMIT_CHAIN, TAKE_CHAIN),
    one("a commit forgets one take only", lua("for n = committed + 1, number do\n    local ids", "for n = number, number do\n    local ids")),
    one("a commit keeps the frames", lua("    drop_frames(k, ids)\n", "", after="register_for_learner('commit'")),
    one("a commit keeps the takes", lua("    call('HDEL', k.takes, n)\n    groups", "    groups")),
    one("a commit does not mark its ids", lua(" call('SADD', k.done, ...) end)", " end)", after="register_for_learner('commit'")),
    one("a commit does not move the watermark", lua("'committed', number, 'watermark', watermark)", "'committed', number)")),
    one("a commit keeps the attempts", lua("call('HDEL', k.attempts, ...) call('HDEL'", "call('HDEL'")),
    one("commits before the checkpoint is there", loop("        oldest = checkpoints.save(", "        self.intake.commit(ledger, version)\n        oldest = checkpoints.save(")),
    one("commits the newest checkpoint, not the oldest", loop('checkpoints.state(oldest)["ledger"]', 'checkpoints.state(version)["ledger"]')),
    # -- learners
    one("a store that lost its memory has another learner", lua("if epoch < tonumber(args[1]) then", "if false then")),
    one("the owner is not looked at", FENCE_OWNER),
    one("the epoch is not looked at", FENCE_EPOCH),
    one("no fence", lua("epoch > tonumber(args[1]) or call('HGET', k.meta, 'owner') ~= args[2]", "false")),
    one("a new learner has no new epoch", NEW_EPOCH),
    two("epochs do not fence", NEW_EPOCH, FENCE_OWNER),
    one("epochs begin again after a wipe", lua("epoch = known + 1", "epoch = epoch + 1")),
    one("a late learner takes the lane", lua("known < epoch or (known == epoch and args[3] == '0')", "false")),
    one("a learner takes the lane from another of its epoch", lua("known < epoch or (known == epoch and args[3] == '0')", "known < epoch")),
    one("a learner that starts asks once", client("redis", "            known = epoch\n", "            break\n")),
    one("the version goes back", lua("math.max(meta(k, 'version'), args[3])", "args[3]")),
    one("the limit goes back", lua("math.max(meta(k, 'limit'), args[4])", "args[4]")),
    one("a revoked holder keeps a ticket", lua("lost_by_holder(k, held(k, args[1], call('HKEYS', k.holders)))", "lost_by_holder(k, {unpack(held(k, args[1], call('HKEYS', k.holders)), 2)})")),
    one("closing closes nothing", lua("call('HSET', k.meta, 'closed', 1)", "call('HSET', k.meta, 'closed', 0)")),
    one("commits need memory", lua("register(name, {'allow-oom'}, function(k, args)\n    call('HSETNX'", "register(name, {}, function(k, args)\n    call('HSETNX'")),
    # -- recovery
    one("takes of another history are kept", KEEP_CHAIN),
    one("takes whose groups are not there are kept", lua("if is_done(k, id) or call('HEXISTS', k.frames, id) == 0 then whole = false end", ""),
        survives="a take that goes on from the ledger is not done yet, and frames go with the commit alone"),
    one("takes that go on from the ledger are forgotten", lua("    if not whole then break end", "    if true then break end")),
    one("takes that are not kept stay", lua("if not after[tonumber(n)] then call('HDEL', k.takes, n) end", "")),
    one("frames of done groups stay", lua("ipairs{k.frames, k.attempts, k.deaths}", "ipairs{k.attempts, k.deaths}")),
    one("a frame of an id that was never issued stays", lua("if not is_id(k, id, issued) then obsolete", "if is_done(k, id) then obsolete")),
    one("leases of done ids stay", lua("local ends_ms = is_id(k, id, issued) and not has_frame(k, id) and tonumber(", "local ends_ms = tonumber(")),
    one("leases end at a recovery", lua("if ends_ms then leases[id]", "if false then leases[id]")),
    one("a recovery issues done ids again", lua("    elseif not is_done(k, id) then\n", "    else\n")),
    one("taken groups are ready as well", lua("if not kept[id] then call('ZADD', k.ready, id, id) end", "call('ZADD', k.ready, id, id)")),
    one("a recovery does not count bytes", lua("id_text(issued), 'bytes', id_text(weight(k))", "id_text(issued)")),
    one("a recovery forgets the watermark", lua("'history', args[10], 'watermark', watermark, 'committed'", "'history', args[10], 'committed'")),
    one("a recovery keeps what was done", lua("  call('DEL', k.done)\n", "", after="register_privileged('recover'")),
    one("a recovery does not mark what is done", lua("    call('SADD', k.done, id)\n", "", after="register_privileged('recover'")),
    one("a wiped store issues done ids", lua("math.max(math.min(total(k, 'issued'), meta(k, 'most')), meta(k, 'watermark'))", "math.min(total(k, 'issued'), meta(k, 'most'))")),
    one("a wiped store issues done ids above the watermark", lua("    issued = math.max(issued, tonumber(id))\n", "")),
    one("a recovery does not open a closed lane", lua("'closed', 0, 'starving', 0,", "'starving', 0,")),
    one("a recovery keeps the credit of before", lua("'limit', args[7], ", "", after="register_privileged('recover'")),
    # -- the client
    one("every lease is the same request", client("redis", "uuid.uuid4().int,", "1,")),
    one("the learner does not learn its epoch", client("redis", "                self._epoch = epoch\n", "")),
    one("a gap is no gap", client("redis", 'if status == b"GAP":', "if False:")),
    one("a fenced learner goes on", client("redis", 'if status == b"FENCED":', "if False:")),
    one("lost frames are left out", client("redis", "        if missing:\n", "        if False:\n")),
    one("a wiped server is not given the functions", client("redis", "client.function_load(LIBRARY, replace=True)", "pass")),
    one("the credit is not told again to a store that forgot it", OPEN_WAITING),
    one("a rejected group does not give its credit back at once", OPEN_REJECTED, survives="it does when the learner next waits"),
    two("a rejected group never gives its credit back", OPEN_WAITING, OPEN_REJECTED),
    one("a group that is newer than its learner is trained", client("judge", "if max(versions) > version or not all(", "if not all("),
        survives="only weights of a lost history are newer, and these are found by their lineage"),
    one("a group one version ahead is trained, of any history", client("judge", "if max(versions) > version or not all(weights in history for weights in sampled_by):", "if max(versions) > version + 1:")),
    # -- histories
    one("a group of a lost history is trained when its number has come again", client("judge", " or not all(weights in history for weights in sampled_by):", ":")),
    one("the judge sees the last span of a rollout only", client("judge", "for span in rollout.version_spans}", "for span in rollout.version_spans[-1:]}")),
    one("all that an earlier learner made belongs to the history", lineage("weights.lineage == last.lineage and weights.version <= last.version", "weights.lineage == last.lineage")),
    one("the history has one version of an earlier learner too many", lineage("and weights.version <= last.version", "and weights.version <= last.version + 1")),
    one("the history has one version of an earlier learner too few", lineage("and weights.version <= last.version", "and weights.version < last.version")),
    one("a learner renames the weights that it has loaded", lineage("if version <= last.version)", "if version < last.version)")),
    one("a learner forgets the learners before the last", lineage("(*recent, self.weights(version))", "(self.weights(version),)")),
    one("a learner forgets what is young enough", lineage("version - longest_lag <= last.version", "version - longest_lag + 2 <= last.version")),
    one("two learners have the same lineage", lineage("return History(lineage, ", "return History(self.lineage or lineage, ")),
    one("the checkpoint does not hold the history", loop('"history": str(self.history)}', '"history": "0"}')),
    one("a recovery keeps the history of before", lua("'history', args[10], ", "")),
    one("tickets carry no history", client("redis", "history=History.parse(history.decode())", "history=INITIAL")),
    # -- groups that nobody can train on
    one("an untrainable group is trained", client("judge", "if reason := trainable(group, self.limits):", "if reason := '':")),
    one("an untrainable group gets another attempt", client("judge", "reason, final=True)", "reason)")),
    one("a group of another lane is trained", client("judge", "if (group.lane, group.ticket_id) != (self.lane, name):", "if group.ticket_id != name:")),
    one("a group that was given up has nothing in its place", lua("  call('HSET', k.frames, rejected, GIVEN_UP .. args[7])\n", "")),
    one("the reason in the place of a frame is not counted", lua("  add(k.totals, 'bytes', #GIVEN_UP + #args[7])\n", "")),
    one("a group that was given up is refused again", lua("given_up(frame) or ", ""), survives="its digest is not that of the frame that is refused"),
    # -- settings that change
    one("a take that is undone stays assigned", lua("    call('HDEL', k.takes, later)\n", "", after="local function unassign_from")),
    one("a take that is undone leaves its groups taken", lua("    for _, id in ipairs(undone.ids) do call('ZADD', k.ready, id, id) end\n", "")),
    one("the credit assumes one batch size for the whole past", client("intake", "credit_limit(self._trained, max_lag", "credit_limit(version * self.groups, max_lag")),
    one("the window of a refill is unbounded", client("intake", "window=self.window)", "window=self.window if not self._step.groups else 1 << 30)")),
    # -- holders that die of a ticket
    one("a death is not counted", lua("      add(k.deaths, id, 1)\n", "")),
    one("what is given back counts as a death", lua("for _, id in ipairs(ids) do issue_again(k, id) end\n  count(k, 'returned'", "lost_by_holder(k, ids)\n  count(k, 'returned'")),
    one("a stored group keeps the deaths of its ticket", lua("  call('HDEL', k.deaths, id)\n", "", after="local function make_ready")),
    one("a ticket is given up one death too early", lua("elseif deaths >= most and call(", "elseif deaths + 1 >= most and call(")),
    one("a ticket that kills is never given up", lua("  bury(k, tonumber(args[7]))\n", "")),
    one("a ticket that is given up has no frame", lua("      call('HSET', k.frames, id, GIVEN_UP .. reason)\n", "")),
    one("a suspect is sampled beside others", lua("  if not first then return nil end\n  local holders", "  if true then return nil end\n  local holders")),
    one("others are leased beside a suspect", lua("if call('HGET', k.holders, id) == holder then return {} end", "")),
    one("who holds others leases a suspect", lua("    if holders[i] == holder then return {} end\n", "")),
    one("whom too many died of is leased once more", lua("local waits = deaths < most and is_id", "local waits = is_id")),
    one("any suspect may be first", lua("if waits and tonumber(id) < (tonumber(first) or math.huge) then", "if waits then")),
    one("a suspect waits for credit that it has not", lua("is_id(k, id, issued) and tonumber(id) <= limit and call(", "is_id(k, id, issued) and call(")),
    # -- steps that kill their learner
    one("learners that died in a step are not counted", launch("step_deaths", "{digest: deaths + 1 for", "{digest: deaths for")),
    one("a step is deadly after two learners", launch("step_deaths", "step.get(digest, 0) >= MAX_DEATHS:", "step.get(digest, 0) >= MAX_DEATHS - 1:")),
    one("a step is deadly for all groups", launch("step_deaths", "if step.get(digest, 0) >= MAX_DEATHS:", "if (step := {digest: max(step.values(), default=0)})[digest] >= MAX_DEATHS:")),
    one("other groups answer for those that killed", launch("step_deaths", "known.get(digest, 0) for digest", "max(known.values(), default=0) for digest")),
    one("a step that was trained stays begun", launch("step_deaths", "        self._steps.pop(version, None)\n        self._write(None)\n", "        pass\n")),
    # -- several ranks
    one("ranks get the groups in another order", launch("same_bytes", "for frame in collected.frames:", "for frame in reversed(collected.frames):")),
    one("a rank takes one group fewer", launch("same_bytes", "range(int(message))", "range(int(message) - 1)")),
    one("frames are found by the ticket that they name", client("judge", "groups.append((group, frame))", "groups.append((group, groups[0][1] if groups else frame))")),
    # -- control messages
    one("anybody speaks for a member", control("zmq", "if (member or holder) != holder or (self._peers.peer(holder) or peer) != peer:", "if False:")),
    one("a member is dead after half of the silence", control("membership", "> self._timeout_s]", "> self._timeout_s / 4]")),
    one("a new member has the initial model", control("updates", "    version: int = _UNKNOWN", "    version: int = 0")),
    one("a report of any lineage counts", control("updates", "Weights(report.version, report.lineage) != order.weights:", "report.version != order.version:")),
    one("a report of any version counts", control("updates", "Weights(report.version, report.lineage) != order.weights:", "report.lineage != order.weights.lineage:")),
    one("a failed update counts as applied", control("updates", "        if not report.applied:\n", "        if False:\n")),
    one("an update that is late left the weights as they were", control("updates", "            member.version = _UNKNOWN", "            pass")),
    one("an update that fails is not tried again", control("updates", "if member.order is not None or now_s < member.until_s", "if member.order is not None or member.failures")),
    one("whoever is unknown does not join again", control("client", "                await self._send(self._current_hello())\n", "                pass\n"),
        survives="it says hello with its next sign of life"),
    one("who was thrown out goes on as a member", control("client", "            case UnknownMember():\n                self._is_member = False\n                await self._send(self._current_hello())\n", "            case UnknownMember():\n                pass\n")),
    one("an order takes the place of a stop", control("client", "if not isinstance(self._order, Stop):", "if True:"),
        survives="a learner that has said stop sends nothing more"),
    # -- defences found missing from outside
    one("one expired lease per call", lua("'-inf', now_ms())", "'-inf', now_ms(), 'LIMIT', 0, 1)")),
    one("the request of a revoked holder stays", lua("  call('HDEL', k.requests, args[1])\n", "")),
    one("the learner waits after a recovery", lua("'closed', 0, 'starving', 0,", "'closed', 0,")),
    one("what is committed runs behind", lua("call('HSET', k.meta, 'committed', number, 'watermark'", "call('HSET', k.meta, 'committed', number - 1, 'watermark'")),
    one("leases end with whole seconds", lua("* 1000 + math.floor(tonumber(time[2]) / 1000)", "* 1000")),
    one("attempts of done ids stay", lua("ipairs{k.frames, k.attempts, k.deaths}", "ipairs{k.frames, k.deaths}")),
    one("a recovery does not lower what is committed", lua("'committed', args[4], 'most'", "'committed', math.max(meta(k, 'committed'), args[4]), 'most'")),
    one("a step is settled before it is booked as trained", client("intake", "        self.ledger.trained += len(step.groups)\n        self.settled = self.ledger.to_dict()\n", "        self.settled = self.ledger.to_dict()\n        self.ledger.trained += len(step.groups)\n")),
    one("rejections are forgotten at a restart", client("ledger", '"rejected": dict(values["rejected"])', '"rejected": {}')),
    one("a store out of memory tells generators that the run is over", client("redis", "return Lease(tickets=(), closed=False)", "return Lease(tickets=(), closed=True)")),
    one("a damaged checkpoint is loaded", Edit("asyncrl/run/manifest.py", "or _sha256(path) != expected[name]", "or False")),
    # -- the rest of the client
    one("a group beyond the bound is trained", client("judge", "if drop_older_than is not None and version - min(versions) > drop_older_than:", "if False:")),
    one("a gap is not healed", HEAL, survives="the store is made to agree with the ledger when no group has come for a minute"),
    two("a gap is never healed", HEAL, MEND),
    one("rejected groups are not counted", client("intake", "self.ledger.count_rejected(kind_of(reason))", "pass")),
    one("the checkpoint holds the ledger of one step before", client("intake", "        self.settled = self.ledger.to_dict()\n        self._step,", "        self._step,")),
    one("the ledger enters no ids", client("ledger", "        self.above.update(ids)\n", "")),
    one("the ledger enters ids twice", REPEATED_IDS, survives="the store never assigns an id twice"),
    one("the ledger saves no ids above the watermark", client("ledger", '"above": sorted(self.above)', '"above": []')),
    one("the ledger's watermark skips one", client("ledger", "while self.watermark + 1 in self.above:", "while self.watermark + 2 in self.above:")),
    one("a ticket may start one version too early", Edit("asyncrl/algo/staleness.py", "version - (limit - ticket_id) // groups)", "version - 1 - (limit - ticket_id) // groups)")),
    one("one step of credit too much", Edit("asyncrl/algo/staleness.py", "(max_lag + 1) * groups", "(max_lag + 2) * groups")),
    one("rejected groups give no credit", Edit("asyncrl/algo/staleness.py", "trained + rejected + ", "trained + ")),
    # -- shards
    one("a shard that has given its part opens the credit of the next step", client("intake", "if version != self._version:", "if True:")),
    one("the other shards do not hear that the learner waits for one", client("shards", "intake.open(version, waiting=True)", "pass")),
    one("a shard that hears that the learner waits for another forgets it", lua("if args[5] == '1' then", "if false then")),
    one("what one shard has given is settled before the step is whole", client("shards", "if len(parts) < len(self.intakes):\n", "if len(parts) < len(self.intakes):\n            self.settled = self._ledgers()\n"),
        survives="the simulated learner saves between two steps; tests/support/shard_contract.py saves within one"),
    one("a shard gives its part of a step twice", client("shards", "if self._parts[shard] is None:", "if True:")),
    one("every shard is committed as far as the first", client("shards", "intake.commit(ledger, version)", 'intake.commit(saved["shards"][0], version)')),
    one("the shards' ids overlap", client("shards", "return (local_id - 1) * shards + shard + 1", "return (local_id - 1) * shards + max(shard, 1)")),
    one("a fresh learner forgets the epoch", client("run_record", "if epoch is not None:", "if False:")),
]  # fmt: skip
