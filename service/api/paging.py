"""Cursor pagination: a page of a list, and where the next one begins."""

from collections.abc import Callable, Sequence
from typing import Annotated, Generic, TypeVar

from fastapi import Query
from pydantic import BaseModel, ConfigDict, Field

PAGE_SIZE = 100

Item = TypeVar("Item")
PageSize = Annotated[int, Query(ge=1, le=1000, description="largest number of items in the page")]


class Page(BaseModel, Generic[Item]):
    """Items, and the `cursor` that asks for the page after this one; null at the end."""

    model_config = ConfigDict(frozen=True)

    items: Sequence[Item]
    next: str | None = Field(default=None)


def page(items: Sequence[Item], limit: int, key: Callable[[Item], object]) -> Page[Item]:
    """A page; the cursor is the last item's key if the page is full."""
    return Page(items=items, next=str(key(items[-1])) if len(items) == limit else None)
