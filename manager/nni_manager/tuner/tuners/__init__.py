"""Built-in tuners, each in one file. `config.algorithms` lists them."""
