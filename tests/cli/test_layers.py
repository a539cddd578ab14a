"""``featstore train`` and ``pack`` with layers of a fixed size, and with one subgraph for all layers."""

from __future__ import annotations

from featstore.cli.main import main


def test_what_does_not_go_together_is_refused(small, capsys) -> None:
    for arguments, message in [
        (["--sampler", "layer"], "--sampler layer needs --layer-sizes"),
        (["--sampler", "layer", "--layer-sizes", "3", "--fanouts", "4"], "--fanouts goes with other samplers, not layer"),
        (["--sampler", "layer", "--layer-sizes", "0"], "a layer has from 1"),
        (["--layer-sizes", "5,5"], "--layer-sizes goes with --sampler layer, not neighbor"),
        (["--sampler", "layer", "--layer-sizes", "5", "--layers", "2"], "--layers goes with --sampler shadow, not layer"),
    ]:
        assert main(["train", str(small.path), *arguments]) != 0
        assert message in capsys.readouterr().err
