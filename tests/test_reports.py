"""What a save and a load tell: reports as data, and lines for the log."""

from __future__ import annotations

import json
import logging
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedTensor

from megatron_fp8_dist import last_report, load, save
from megatron_fp8_dist.report import LoadReport, SaveReport
from tests import toy_model

pytestmark = pytest.mark.usefixtures("single")

PLACE = toy_model.Layout().place(0)
NUM_QUANTIZED = len(toy_model.QUANTIZED) * toy_model.NUM_LAYERS
CODES = toy_model.NUM_LAYERS * sum(w.shape[0] * w.shape[1] for w in toy_model.QUANTIZED)
SCALES = toy_model.NUM_LAYERS * (len(toy_model.QUANTIZED) + 1)
"""One per fragment: SwiGLU has two."""


def test_reports_of_a_round_trip(tmp_path: Path) -> None:
    save(toy_model.Toy("block_scaled", PLACE).sharded_state_dict(), tmp_path)
    saved = last_report()
    assert isinstance(saved, SaveReport)
    assert (saved.tensors, saved.codes, saved.component_bytes) == (NUM_QUANTIZED, CODES, CODES + 4 * SCALES)
    assert saved.seconds > 0

    load(toy_model.Toy("block_scaled", PLACE, blank=True).sharded_state_dict(), tmp_path)
    loaded = last_report()
    assert isinstance(loaded, LoadReport)
    assert (loaded.exact, loaded.codes, loaded.component_bytes) == (NUM_QUANTIZED, CODES, CODES + 4 * SCALES)
    assert loaded.seconds > 0

    for report in (saved, loaded):
        assert json.loads(json.dumps(report.to_dict()))["checkpoint_dir"] == str(tmp_path)
        with pytest.raises(FrozenInstanceError):
            report.codes = 0  # type: ignore[misc]


def test_one_line_per_save_and_load(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "megatron_fp8_dist")
    save(toy_model.Toy("block_scaled", PLACE).sharded_state_dict(), tmp_path)
    load(toy_model.Toy("block_scaled", PLACE, blank=True).sharded_state_dict(), tmp_path)
    lines = [r.getMessage() for r in caplog.records if r.name == "megatron_fp8_dist"]
    assert [line.partition(" ")[0] for line in lines] == ["saved", "loaded"]
    assert f"saved {NUM_QUANTIZED} quantized tensors ({CODES} codes" in lines[0]
    assert f"loaded {NUM_QUANTIZED} exact, 0 requantized, 0 dequantized, 0 quantized parameters" in lines[1]


def halves(number: int) -> dict[str, Any]:
    """A weight in two fragments of unequal scale."""
    codes = torch.arange(16).to(torch.uint8).reshape(2, 8)
    return {
        f"{number} {i}": ShardedTensor.from_rank_offsets(
            f"weight{number:02}", toy_model.quantized("block_scaled", codes, 0.5 + i), (0, i, 2)
        )
        for i in (0, 1)
    }


def test_a_warning_names_at_most_ten_keys(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(dict(enumerate(map(halves, range(12)))), tmp_path)
    wholes = {
        number: ShardedTensor.from_rank_offsets(
            f"weight{number:02}", toy_model.quantized("block_scaled", torch.zeros(4, 8, dtype=torch.uint8), 1.0)
        )
        for number in range(12)
    }
    load(wholes, tmp_path)
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert warning.count("weight") == 10
    assert "and 2 more" in warning
