"""Mends four things in Triton's interpreter (3.6 to 3.9), where it is on: import it before kernels run.

Loop bounds that were loaded (an array of one is no integer in NumPy 2.4); products of bfloat16, which it takes for
integers; conversions between floats, which it truncates, or rounds without carrying into the exponent (3.6);
comparisons, whose result keeps the type of what was compared (3.9).

And two that only cost time, together more than half of it: reductions with a function of one's own go element by
element, and Triton's language is patched anew for every function that a kernel calls.
"""

from types import SimpleNamespace

import numpy as np
import torch
import triton.language as tl

import kernels

TORCH = {tl.float32: torch.float32, tl.float16: torch.float16, tl.bfloat16: torch.bfloat16, tl.float64: torch.float64}
TORCH |= {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}


def convert(x, source, target, rounding_mode):
    """x: the bits of `source` in any array -> the bits of `target`, rounded to the nearest, ties to even."""
    x = torch.from_numpy(np.ascontiguousarray(x).view(f"int{source.primitive_bitwidth}")).view(TORCH[source])
    bits = {8: torch.int8, 16: torch.int16, 32: torch.int32, 64: torch.int64}[target.primitive_bitwidth]
    return x.to(TORCH[target]).view(bits).numpy().view(f"uint{target.primitive_bitwidth}")


if kernels.interpreted():
    from triton.runtime import interpreter

    def patch_tensor(tensor, scope, patch=interpreter._patch_lang_tensor):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def dot(self, a, b, d, *how, product=interpreter.InterpreterBuilder.create_dot):
        wide = lambda x: x if x.dtype.scalar != tl.bfloat16 else self.create_fp_ext(x, tl.float32)
        return product(self, wide(a), wide(b), d, *how)

    def cast(self, x, target, plain=interpreter.InterpreterBuilder.cast_impl):
        source, target = x.dtype.scalar, target.scalar
        if source not in TORCH or target not in TORCH:
            return plain(self, x, target)
        data = convert(x.data, source, target, None).view(interpreter._get_np_dtype(target))
        return interpreter.TensorHandle(data, target)

    def binary(self, lhs, rhs, op, plain=interpreter.InterpreterBuilder.binary_op):
        result = plain(self, lhs, rhs, op)
        return interpreter.TensorHandle(result.data, tl.int1) if result.data.dtype == np.bool_ else result

    def reduce(self, inputs, plain=interpreter.ReduceOps.generic_reduce):
        """By halves: sizes are powers of two."""
        if self.axis is None:
            return plain(self, inputs)
        parts = [x.handle.data for x in inputs]
        while parts[0].shape[self.axis] > 1:
            halves = zip(*(np.split(x, 2, self.axis) for x in parts))
            tensors = [self.to_tensor(x, given.dtype) for half in halves for x, given in zip(half, inputs)]
            result = self.combine_fn.fn(*tensors)
            parts = [x.handle.data for x in (result if isinstance(result, (tuple, tl.tuple)) else [result])]
        parts = parts if self.keep_dims else [x.squeeze(self.axis) for x in parts]
        return [self.to_tensor(x, given.dtype) for x, given in zip(parts, inputs)]

    interpreter._patch_lang_tensor = patch_tensor
    interpreter.InterpreterBuilder.binary_op = binary
    interpreter._convert_float = convert
    interpreter.InterpreterBuilder.cast_impl = cast
    interpreter.InterpreterBuilder.create_dot = dot
    interpreter.ReduceOps.generic_reduce = reduce

    # once for all kernels, never undone
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda function: interpreter._LangPatchScope()
