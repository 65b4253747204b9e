"""The same bytes on a GPU as on a CPU, for every storage. Run with `pytest -m gpu`."""

import pytest
import torch

from replayssm.formats.storage import STORAGES


@pytest.mark.gpu
@pytest.mark.parametrize("name", STORAGES)
def test_cuda_stores_and_reads_the_same_bytes(name):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 3, 64, 80, generator=generator)
    x *= torch.exp2(torch.randint(-40, 15, (4, 3, 64, 1), generator=generator).float())
    x[0, 0, 0] = 0
    row = torch.arange(4)

    def written(device):
        at = row.to(device)
        address = dict(seed=at, layer=3, stream=1, flush_index=at * 7, sequence=at + 1)
        bits = STORAGES[name].draw_bits(x.shape, **address)
        return STORAGES[name].write(x.to(device), bits)

    here, there = written("cpu"), written("cuda")
    for mine, theirs in zip(here.tensors().values(), there.tensors().values(), strict=True):
        assert theirs.cpu().view(torch.uint8).equal(mine.view(torch.uint8))
    assert there.saturated.cpu().equal(here.saturated)
    read = STORAGES[name].read
    assert read(there).cpu().view(torch.int32).equal(read(here).view(torch.int32))
