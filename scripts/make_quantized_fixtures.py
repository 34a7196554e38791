"""Writes the fixtures of quantized tensors, with the libraries that define the formats.

    python -m scripts.make_quantized_fixtures tests/fixtures/quantized

Requires torch, bitsandbytes and compressed-tensors. The committed files were written
with bitsandbytes 0.50.2 and compressed-tensors 0.20.0. Each file has tensors as a
folder stores them, and `expected`: the weights to which the library widens them.
"""

# pyright: reportMissingImports=false

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import bitsandbytes.functional as bnb
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import save_file

OUT, IN = 16, 192  # three blocks of 64 in each row
Tensors = dict[str, torch.Tensor]


def four_bits(kind: str, nested: bool) -> Tensors:
    """Returns a weight in NF4 or FP4 of bitsandbytes."""
    weight = torch.randn(OUT, IN, generator=torch.Generator().manual_seed(0))
    codes, state = bnb.quantize_4bit(
        weight, blocksize=64, compress_statistics=nested, quant_type=kind
    )
    parts = {f"m.weight.{name}": x for name, x in state.as_dict(packed=True).items()}
    return {
        "m.weight": codes,
        "expected": bnb.dequantize_4bit(codes, state),
        **parts,
    }


def rows_of_int8() -> Tensors:
    """Returns a weight in int8 of bitsandbytes."""
    weight = torch.randn(OUT, IN, generator=torch.Generator().manual_seed(0))
    codes, scales, _ = bnb.int8_vectorwise_quant(weight.half())
    expected = bnb.int8_vectorwise_dequant(codes, scales)
    return {"m.weight": codes, "m.SCB": scales, "expected": expected}


def compressed(name: str, arguments: dict, *, scale_dtype: torch.dtype) -> Tensors:
    """Returns a weight in a format of compressed-tensors."""
    weight = torch.randn(OUT, IN, generator=torch.Generator().manual_seed(0))
    settings = QuantizationArgs(**arguments)
    scheme = QuantizationScheme(targets=["Linear"], weights=settings)
    size = settings.group_size or IN
    groups = weight.reshape(OUT, -1, size)
    low, high = groups.amin(-1), groups.amax(-1)
    if name.startswith("nvfp4"):
        ratio = torch.finfo(torch.float8_e4m3fn).max * 6 / weight.abs().max()
        scale, zero = calculate_qparams(low, high, settings, global_scale=ratio)
        stored = {"weight_global_scale": ratio.reshape(1)}
    else:
        scale, zero = calculate_qparams(low, high, settings)
        scale, stored = scale.to(scale_dtype), {}
    if not settings.symmetric:
        stored["weight_zero_point"] = zero
    state = {"weight": weight, "weight_scale": scale, **stored}
    compressor = BaseCompressor.get_value_from_registry(name)
    packed = {
        k: x for k, x in compressor.compress(state, scheme).items() if x is not None
    }
    wide = compressor.decompress(dict(packed), scheme)["weight"]
    return {
        "expected": wide.float(),
        **{f"m.{k}": x.contiguous() for k, x in packed.items()},
    }


def fixtures() -> Iterator[tuple[str, Tensors]]:
    """Yields the name and the tensors of each fixture."""
    yield "bitsandbytes_nf4", four_bits("nf4", nested=False)
    yield "bitsandbytes_nf4_nested", four_bits("nf4", nested=True)
    yield "bitsandbytes_fp4", four_bits("fp4", nested=False)
    yield "bitsandbytes_int8", rows_of_int8()
    group = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64}
    half = {"scale_dtype": torch.bfloat16}
    yield "pack_int4", compressed("pack-quantized", group | {"symmetric": True}, **half)
    asymmetric = group | {"symmetric": False}
    yield "pack_int4_zeros", compressed("pack-quantized", asymmetric, **half)
    rows = {"num_bits": 8, "strategy": "channel", "symmetric": True}
    yield "pack_int8", compressed("pack-quantized", rows | {"type": "int"}, **half)
    yield "float8", compressed("float-quantized", rows | {"type": "float"}, **half)
    sixteen = {"num_bits": 4, "type": "float", "symmetric": True, "group_size": 16}
    nvfp4 = sixteen | {"strategy": "tensor_group"}
    yield "nvfp4", compressed("nvfp4-pack-quantized", nvfp4, **half)


def main() -> None:
    """Writes all fixtures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, tensors in fixtures():
        held = {k: x.detach().cpu().contiguous() for k, x in tensors.items()}
        save_file(held, folder / f"{name}.safetensors")
        print(json.dumps({name: {k: list(x.shape) for k, x in held.items()}}))


if __name__ == "__main__":
    main()
