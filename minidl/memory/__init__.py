"""Training in a fraction of the memory: what stays on the GPU, what travels to the host, what is made again.

`record` walks a training step on shapes alone, `problem` finds what can be away and when, `pin` decides by dynamic
programming, `best` also over rebuilding and by the clock; `check`, `timeline` and `validate` look at a plan without
trusting whoever made it. Plans and traces are plain records. Nothing here needs a GPU.

The files in the order in which a step passes through them:

    record, watch               a step walked on shapes, and what is seen of it
    recording, trace            what it tells an executor, and planners; records as JSON
    visits, times               momentum that visits; how long each pass takes
    gaps, pinning               who may be away when; the dynamic programme over keeping and moving
    rebuild, joint, planner     recipes; the programme over rebuilding too; the search for the fastest plan
    plan, simulate, program     the record of a plan; its check, its time, its operations on streams and their proof
    placement, script           offsets; a plan down to the byte
    _loops                      inner loops of pinning and placement, compiled
    limit, limited, execute     what a limit is; a model's steps within one; the store that carries a script out
    arena                       the one block of memory of captured steps without a limit
"""

from minidl.memory.gaps import Gap, Problem, problem
from minidl.memory.joint import Joint
from minidl.memory.limited import LimitedMemory, limit_memory
from minidl.memory.pinning import pin
from minidl.memory.plan import Decision, Infeasible, Plan
from minidl.memory.planner import best, widen
from minidl.memory.program import Operation, Race, program, validate
from minidl.memory.record import record
from minidl.memory.simulate import Link, Timeline, Usage, Violation, check, measure, timeline
from minidl.memory.trace import Step, Tensor, Trace

__all__ = [
    "Decision", "Gap", "Infeasible", "Joint", "LimitedMemory", "Link", "Operation", "Plan", "Problem", "Race", "Step",
    "Tensor", "Timeline", "Trace", "Usage", "Violation", "best", "check", "limit_memory", "measure", "pin", "problem",
    "program", "record", "timeline", "validate", "widen",
]  # fmt: skip
