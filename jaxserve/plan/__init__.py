"""Which split of a model over devices fits, and how fast it would be: no devices and no weights are needed.

How this works: an `EngineConfig` is made for each split, as the command line would. What a rank weighs, how heads are
padded, and how many pages fit come from the engine's own code (`weights.loader.param_bytes_per_device`,
`Model.config_on`, `config.resolve`); only time is modelled here (`jaxserve.plan.roofline`).
"""

from jaxserve.plan.memory import Memory as Memory, memory_of as memory_of
from jaxserve.plan.planner import Plan as Plan, plan as plan
from jaxserve.plan.splits import SplitPlan as SplitPlan
