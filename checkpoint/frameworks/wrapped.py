"""Optimizers that keep state where ``optimizer.state`` does not show it, which a save would lose."""

from __future__ import annotations

from collections.abc import Iterator

from torch.optim import Optimizer

from checkpoint.errors import StateError


def check_state_is_here(name: str, optimizer: Optimizer) -> None:
    """Check that what an optimizer gives as its state dict is in its ``state`` and ``param_groups``.

    A class that overrides neither ``state_dict`` nor ``load_state_dict`` is not looked into. One that wraps another
    optimizer passes if both have the same ``state``. The state dict is asked for only where that is cheap: of a
    wrapper, and where there is no state.

    Args:
        name: What to call the optimizer in errors.
        optimizer: The optimizer.

    Raises:
        StateError: Some of its state is elsewhere; says where.
    """
    for one in reversed(_looked_into(name, optimizer)):
        if list(_held(one)) or not one.state:
            _check_state_dict(name, one)


def _looked_into(name: str, optimizer: Optimizer) -> list[Optimizer]:
    """An optimizer, those inside it and those inside them, as far as they override their state dicts."""
    found: list[Optimizer] = []
    waiting = [optimizer]
    while waiting:
        one = waiting.pop()
        if one in found or not _overrides(one):
            continue
        found.append(one)
        for attribute, inner in _held(one):
            if inner.state is not one.state:
                raise StateError(
                    f"{name}: {_class(one)} keeps state in another optimizer, its '{attribute}', where it would be "
                    "lost; use a plain optimizer (sharded: with fully_shard), give that one in its place if it is the "
                    "same on all ranks, or hand over shards as flat_shards()"
                )
            waiting.append(inner)
    return found


def _check_state_dict(name: str, optimizer: Optimizer) -> None:
    given = optimizer.state_dict()
    lost = sorted(str(key) for key in given.keys() - {"state", "param_groups"})
    if given.get("state") and not optimizer.state:
        lost.append("state")
    if lost:
        raise StateError(
            f"{name}: {_class(optimizer)}.state_dict() gives '{lost[0]}', which is not in optimizer.state and would be "
            "lost; use a plain optimizer, and put the rest in a dict of the state"
        )


def _overrides(optimizer: Optimizer) -> bool:
    cls = type(optimizer)
    return cls.state_dict is not Optimizer.state_dict or cls.load_state_dict is not Optimizer.load_state_dict


def _held(optimizer: Optimizer) -> Iterator[tuple[str, Optimizer]]:
    """The optimizers among an optimizer's attributes, and in lists and dicts there, with the attribute's name."""
    for attribute, value in vars(optimizer).items():
        items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
        yield from ((attribute, item) for item in items if isinstance(item, Optimizer))


def _class(optimizer: Optimizer) -> str:
    return type(optimizer).__name__
