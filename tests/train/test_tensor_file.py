"""Tensors of torch.save are read into place as torch.load reads them, and what is no such tensor is refused."""

from __future__ import annotations

import io

import pytest
import torch

from dataload.train.checkpoint.tensor_file import Part, read_into, unsummed

TENSORS = {
    "floats": torch.arange(12.0).reshape(3, 4),
    "bfloat16": torch.arange(5).bfloat16(),
    "booleans": torch.tensor([True, False, True]),
    "complex": torch.arange(3.0) * 1j,
    "one number": torch.tensor(7),
    "nothing": torch.empty(0, 3),
    "a transposed one": torch.arange(12.0).reshape(3, 4).T,
    "the end of another": torch.arange(12.0)[5:],
    "one row, repeated": torch.arange(3.0).expand(4, 3),
}


def saved(tensor, before=b"before", after=b"after" * 20):
    file = io.BytesIO()
    with unsummed():
        torch.save(tensor, file)
    body = file.getvalue()
    return Part(io.BytesIO(before + body + after), len(before), len(body))


def whole(tensor):
    return [0] * tensor.dim(), list(tensor.size())


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_is_read_into_its_place(name):
    tensor = TENSORS[name]
    target = torch.full_like(tensor, 1, memory_format=torch.contiguous_format)
    read_into(target, saved(tensor), *whole(tensor))
    assert torch.equal(target, tensor)


def test_a_part_of_a_tensor_is_read():
    target = torch.zeros(2, 2)
    read_into(target, saved(TENSORS["floats"]), [1, 2], [2, 2])
    assert torch.equal(target, TENSORS["floats"][1:3, 2:4])


def test_a_place_that_is_not_contiguous_or_of_another_type_gets_the_values():
    for target in (torch.zeros(4, 3).T, torch.zeros(3, 4, dtype=torch.float64)):
        read_into(target, saved(TENSORS["floats"]), *whole(target))
        assert torch.equal(target, TENSORS["floats"].to(target.dtype))


def test_without_offsets_of_torch_it_loads_as_usual(monkeypatch):
    target, part, load = torch.zeros(3, 4), saved(TENSORS["floats"]), torch.load

    def older(part, map_location, **options):
        if map_location == "meta":
            return torch.empty(3, 4, device="meta")
        return load(part, map_location=map_location, **options)

    monkeypatch.setattr(torch, "load", older)
    read_into(target, part, *whole(target))
    assert torch.equal(target, TENSORS["floats"])


def test_another_tensor_is_refused():
    with pytest.raises(ValueError, match=r"shape \[3, 4\], not \[4\]"):
        read_into(torch.zeros(4), saved(TENSORS["floats"]), [0, 0], [3, 4])


def test_bytes_behind_the_part_are_no_values(monkeypatch):
    monkeypatch.setattr(torch, "load", lambda part, **_: planted(part))

    def planted(part):
        layout = torch.empty(3, 4, device="meta")
        layout.untyped_storage()._checkpoint_offset = part.seek(0, io.SEEK_END) - 10
        return layout

    with pytest.raises(ValueError, match="ends before its last value"):
        read_into(torch.zeros(3, 4), saved(TENSORS["floats"]), [0, 0], [3, 4])
