"""How a batch is made: groups to sequences, advantages, masks, packed micro-batches, losses."""
