"""`python -m nni_manager.cli` is nnictl: NNI's package installs a command of the same name."""

from nni_manager.cli.entry import main

main()
