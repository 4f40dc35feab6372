"""In one run: kills, power, wipes, replies, partitions, disks, hangs, poison, bad messages, damaged files."""

from functools import partial

from . import damage, faults, poison
from .faults import KINDS, Fault, Scenario

POISON: dict[Fault, float] = {
    partial(poison.put_frame, kind): 1.0 for kind in (*poison.GROUPS, poison.UNDECODABLE)
}
DEADLY: dict[Fault, float] = {partial(poison.plant, "ticket"): 2.0, partial(poison.plant, "step"): 2.0}
FILES: dict[Fault, float] = {
    partial(damage.damage_file, name): 1.5 for name in (*damage.LEARNER, *damage.STORE)
}
HANGS: dict[Fault, float] = {
    partial(faults.stop, kinds): 1.0 for kinds in [*((kind,) for kind in KINDS), KINDS]
}
OTHERS: dict[Fault, float] = {
    faults.kill_generator: 2.0,
    faults.kill_learner: 2.0,
    faults.kill_store: 2.0,
    faults.lose_power: 2.0,
    faults.wipe: 1.0,
    faults.rewrite_log: 1.0,
    faults.fill_disk: 1.0,
    faults.partition: 1.5,
    faults.pause_generator: 1.0,
    faults.pause_learner: 1.0,
    faults.usurp: 0.5,
    poison.send_message: 2.0,
    poison.write_values: 1.0,
}
HARDENING = Scenario(
    name="hardening",
    faults=OTHERS | POISON | DEADLY | FILES | HANGS,
    gap_s=0.5,
    share=1.0,
    calm=True,
    calm_steps=16,
    at_once=(1, 1, 1, 1, 1, 2, 2, 2, 3, 4),
    hang_s=6.0,
    always=partial(faults.swallow, 0.005, 0.005),
)
"""Half of the rounds are of one fault: their pauses are that fault's."""
