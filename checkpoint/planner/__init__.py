"""Who writes what: replicas deduplicated, bytes spread over ranks, the result checked to tile every tensor.

Each rank describes its boxes (:func:`describe`). One rank joins the descriptions into a plan (:func:`make_plan`) and
tells every rank which of its own boxes to write, by their position in what it described. Between the two there are
only columns of numbers, whatever the number of boxes.
"""

from checkpoint.planner.description import describe, dtype_name, local_boxes, torch_dtype
from checkpoint.planner.plan import Plan, make_plan, positions_in

__all__ = ["Plan", "describe", "dtype_name", "local_boxes", "make_plan", "positions_in", "torch_dtype"]
