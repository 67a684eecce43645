"""A property that is found when it is first asked for.

`functools.cached_property` without its lock, which before Python 3.12 is one for all objects of a class: the threads
that read would wait for each other's files, and, where one property asks for another, for each other for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar, overload

T = TypeVar("T")


class lazy(Generic[T]):  # noqa: N801  # used like property
    """Decorates a method that must be pure: two threads that ask at once may both call it.

    Args:
        find: the method.
    """

    def __init__(self, find: Callable[[Any], T]) -> None:
        self._find = find
        self._name = find.__name__
        self.__doc__ = find.__doc__

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: object | None, owner: type) -> Self | T:
        """The value; from the second time on it is the object's own attribute, which Python finds first."""
        if instance is None:
            return self
        value = instance.__dict__[self._name] = self._find(instance)
        return value
