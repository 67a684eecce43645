"""What pieces cost: the models behind ``cost:`` in a mixture file, and what is derived from the shape of a model.

::

    protocol.py    CostModel: what a cost model is
    lengths.py     AttentionCost, TokenCost: from lengths alone
    mixed.py       MixedCost: FLOPs by module, from …
    decoder.py       … Decoder and …
    encoder.py       … Encoder, of sizes named as in …
    hf_config.py     … Hugging Face's config.json
    calibrated.py  CalibratedCost: time, by coefficients that …
    fitting.py       … TimeFit finds in measured times
    function.py    FunctionCost: a function of the user's
    named.py       cost_model: which of these is meant
    check.py       checked: whether what came back is costs
    memory.py      Memory: bytes of a rank, and how many tokens a lane may have
    exact.py, flops.py, sizes.py    arithmetic and checks that they share

Costs decide plans, so they are integers, computed without rounding that could differ between machines.
"""

from omniload.planner.costs.calibrated import FEATURES, CalibratedCost
from omniload.planner.costs.check import checked
from omniload.planner.costs.decoder import Decoder
from omniload.planner.costs.encoder import Encoder
from omniload.planner.costs.fitting import TimeFit
from omniload.planner.costs.flops import FLOPS_UNIT
from omniload.planner.costs.function import FunctionCost
from omniload.planner.costs.lengths import LINEAR_TOKENS, AttentionCost, TokenCost, attention_cost
from omniload.planner.costs.memory import Memory
from omniload.planner.costs.mixed import MixedCost
from omniload.planner.costs.named import cost_model
from omniload.planner.costs.protocol import MODULES, CostModel

__all__ = [
    "FEATURES",
    "FLOPS_UNIT",
    "LINEAR_TOKENS",
    "MODULES",
    "AttentionCost",
    "CalibratedCost",
    "CostModel",
    "Decoder",
    "Encoder",
    "FunctionCost",
    "Memory",
    "MixedCost",
    "TimeFit",
    "TokenCost",
    "attention_cost",
    "checked",
    "cost_model",
]
