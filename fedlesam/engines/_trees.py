"""Dicts of dicts of tensors that have a row per client."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Tree = dict[str, Any]
"""Tensors by name, in dicts of dicts."""


def map_tree(tree: Mapping[str, Any], change: Callable[[Tensor], Tensor]) -> Tree:
    """The same dicts with other tensors."""
    return {name: map_tree(t, change) if isinstance(t, dict) else change(t) for name, t in tree.items()}


def stack_trees(trees: Sequence[Tree]) -> Tree:
    """A row per tree of each tensor; numbers stay, of the first."""
    return {
        name: stack_trees([tree[name] for tree in trees])
        if isinstance(value, dict)
        else torch.stack([tree[name] for tree in trees])
        if isinstance(value, Tensor)
        else value
        for name, value in trees[0].items()
    }


def column_trees(trees: Sequence[Tree], like: Tensor) -> Tree:
    """One vector of each number that the trees have."""
    return {
        name: column_trees([tree[name] for tree in trees], like)
        if isinstance(value, dict)
        else like.new_tensor([tree[name] for tree in trees])
        for name, value in trees[0].items()
    }


def take_rows(tree: Tree, places: list[int]) -> Tree:
    """Some rows; no copy where all of them are asked for in their order, or are one vector in memory."""

    def take(t: Tensor) -> Tensor:
        if not t.ndim or places == list(range(t.shape[0])):
            return t
        if t.stride(0) == 0:
            return t[: len(places)]
        return t.index_select(0, torch.tensor(places, device=t.device))

    return map_tree(tree, take)


def dims_of(tree: Tree) -> Tree:
    """For a map over rows: 0 where there are rows, None for a number."""
    return {name: dims_of(t) if isinstance(t, dict) else 0 if t.ndim else None for name, t in tree.items()}


def leaves(tree: Tree) -> list[Tensor]:
    """The tensors of a tree."""
    return [leaf for t in tree.values() for leaf in (leaves(t) if isinstance(t, dict) else (t,))]
