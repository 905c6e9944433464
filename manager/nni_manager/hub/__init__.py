"""The server of all experiments of a user (`nnictl web`): a list, a comparison, and each experiment's page on one port."""
