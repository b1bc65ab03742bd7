"""The exceptions of moelora_ops, a sentence each.

Wrong shapes, values and layouts raise `ValueError`, wrong types and dtypes `TypeError`; both name the argument, what was
expected and what came.
"""


class AdapterError(ValueError):
    """An adapter on disk cannot be read exactly, and the message says which tensor or field is to blame."""


class UnsupportedError(ValueError):
    """The request is well formed, but no kernel of this build can serve it; the message names the way out."""
