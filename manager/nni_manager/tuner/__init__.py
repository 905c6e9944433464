"""Who proposes parameters. `base.Tuner` is the contract, `registry.make_tuner` the way in."""
