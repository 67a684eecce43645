"""The Planner role and the stages it is made of: mix, pack, cost, balance, freeze."""

from omniload.planner.plan import Plan
from omniload.planner.planner import Planner
from omniload.planner.reader import Metadata
from omniload.planner.state import SourceState, StreamState

__all__ = ["Metadata", "Plan", "Planner", "SourceState", "StreamState"]
