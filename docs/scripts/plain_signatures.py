"""What the API reference shows of signatures: plain defaults and public arguments."""

from typing import Any

import griffe


class PlainSignatures(griffe.Extension):
    """`lr_decay: float = 1.0` for the declaration `param(1.0, above=0)`, and no private arguments."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Called for every attribute that is read.

        Args:
            attr: The attribute.
        """
        value = attr.value
        if isinstance(value, griffe.ExprCall) and str(value.function) == "param":
            attr.value = value.arguments[0]

    def on_function_instance(self, *, func: griffe.Function, **_: Any) -> None:
        """Called for every function that is read.

        Args:
            func: The function.
        """
        for name in [parameter.name for parameter in func.parameters if parameter.name.startswith("_")]:
            del func.parameters[name]
