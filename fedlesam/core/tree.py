"""Batches of any form: a tensor, or dicts, tuples, named tuples and lists of them."""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Tree = Any
"""A tensor, or a dict, tuple, named tuple or list of trees. What is none of these is a leaf that stays as it is."""


def tree_map(f: Callable[[Tensor], Any], tree: Tree, other: Callable[[Any], Any] | None = None) -> Tree:
    """The same tree with f of every tensor, and `other` of every leaf that is none.

    Args:
        f: Applied to every tensor.
        tree: Dicts, tuples and lists, nested.
        other: Applied to every other leaf; None keeps it.
    """
    if isinstance(tree, Tensor):
        return f(tree)
    kind = type(tree)
    if kind is tuple or kind is list:
        return kind([tree_map(f, part, other) for part in tree])
    if kind is dict:
        return {key: tree_map(f, part, other) for key, part in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return kind(*(tree_map(f, part, other) for part in tree))
    if isinstance(tree, Mapping):
        parts = {key: tree_map(f, part, other) for key, part in tree.items()}
        same: Any = copy.copy(tree)
        if dataclasses.is_dataclass(same):  # as the outputs of transformers are
            return dataclasses.replace(same, **parts)  # type: ignore[type-var]
        same.update(parts)
        return same
    return other(tree) if other is not None else tree


def tree_items(tree: Tree, path: str = "batch") -> Iterator[tuple[str, Any]]:
    """Every leaf with its place, as one would write it: batch["input_ids"], batch[0][1].

    Args:
        tree: Dicts, tuples and lists, nested.
        path: What the tree itself is called.
    """
    if isinstance(tree, Mapping):
        for key, part in tree.items():
            yield from tree_items(part, f'{path}["{key}"]' if isinstance(key, str) else f"{path}[{key!r}]")
    elif isinstance(tree, tuple | list):
        for number, part in enumerate(tree):
            yield from tree_items(part, f"{path}[{number}]")
    else:
        yield path, tree


def leaves(tree: Tree) -> list[Any]:
    """All leaves, in their order.

    Args:
        tree: Dicts, tuples and lists, nested.
    """
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, tuple | list):
        return [leaf for part in tree for leaf in leaves(part)]
    if isinstance(tree, Mapping):
        return [leaf for part in tree.values() for leaf in leaves(part)]
    return [tree]


def named_tensors(tree: Tree) -> list[tuple[str, Tensor]]:
    """The tensors of a batch by their names in a message: x and y of a pair.

    Args:
        tree: A batch.
    """
    if isinstance(tree, tuple | list) and len(tree) == 2 and all(isinstance(part, Tensor) for part in tree):
        return [("x", tree[0]), ("y", tree[1])]
    return [(name, leaf) for name, leaf in tree_items(tree) if isinstance(leaf, Tensor)]


def move(tree: Tree, device: torch.device) -> Tree:
    """Everything on a device; an object that is no tree moves by its own method `to`.

    Args:
        tree: Dicts, tuples and lists, nested.
        device: Where its tensors should be.
    """
    return tree_map(
        lambda tensor: tensor.to(device, non_blocking=True),
        tree,
        lambda leaf: leaf.to(device) if hasattr(leaf, "to") else leaf,
    )


def is_rows(tree: Tree, size: int) -> bool:
    """Whether a batch is made of tensors alone, with a row for each of its samples.

    Args:
        tree: A batch.
        size: Its samples.
    """
    return all(isinstance(leaf, Tensor) and leaf.ndim > 0 and len(leaf) == size for leaf in leaves(tree))


def join(f: Callable[[list[Tensor]], Tensor], trees: Sequence[Tree]) -> Tree:
    """One tree of several alike: f of the tensors that are at the same place.

    Args:
        f: Makes one tensor of those at one place, e.g. `torch.cat`.
        trees: Of one form.
    """
    columns = zip(*(leaves(tree) for tree in trees), strict=True)
    joined = iter([f(list(column)) for column in columns])
    return tree_map(lambda _: next(joined), trees[0])
