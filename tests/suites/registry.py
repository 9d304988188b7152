"""Which suites there are. A new one is a module here, with `run(tier, seed)`, and a line in `SUITES`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType

from tests.suites.report import SuiteReport, Tier

# By id, the module under tests/suites; imported when it runs.
SUITES: Mapping[str, str] = MappingProxyType(
    {
        "F3": "engine_door_fuzz",
        "K4": "error_injection",
        "E1": "not_finite",
        "E2": "slot_reuse",
        "X1": "texts",
        "X2": "stop_strings",
        "S2": "clock",
        "F1": "value_fuzz",
        "F2": "schema_fuzz",
        "F4": "raw_sockets",
        "F5": "keyless",
        "G1": "grammar_abuse",
        "G2": "schema_walks",
        "G3": "template_abuse",
        "C1": "aborted_streams",
        "C2": "client_ids",
        "C3": "slow_readers",
        "K1": "kills",
        "K2": "hangs",
        "K3": "shutdowns",
        "K5": "start_faults",
        "S1": "soak",
    }
)
# Suites that may run beside each other, those of a lane one after the other: the first have no server, or wait for
# deadlines most of the time. In the others a clock judges what neighbours slow down.
LANES = (
    ("F3", "K4", "E1", "E2", "X1", "X2", "S2", "K2"),
    ("F1", "F2", "G2", "G3", "C1", "C2", "K1", "K5"),
)
DEFAULT_SEED = 20_240


def run_suite(name: str, tier: Tier, seed: int = DEFAULT_SEED) -> SuiteReport:
    """Runs one suite."""
    module = importlib.import_module(f"tests.suites.{SUITES[name]}")
    report: SuiteReport = module.run(tier, seed)
    return report
