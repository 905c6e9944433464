"""Built-in assessors. `config.algorithms` lists their files."""
