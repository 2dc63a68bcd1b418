"""Triton's interpreter under NumPy 2.4."""


def allow_loaded_loop_bounds() -> None:
    """Let a kernel loop to a bound that it loaded: the interpreter holds scalars in arrays of one element.

    It makes an integer of one with `int(array)`, which NumPy 2.4 refuses for arrays that are not 0-dimensional.
    """
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: type, scope: object) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda scalar: scalar.handle.data.item())

    interpreter._patch_lang_tensor = patched
