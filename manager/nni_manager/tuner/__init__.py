"""Tuners and assessors. `base.Tuner` is the contract, `registry.make_tuner` the entry point."""
