"""Tuners and assessors. `base.BaseTuner` is the contract, `registry.make_tuner` the entry point."""
