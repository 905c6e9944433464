"""SSH as people use it: logins, and connections with their configuration, agents, jump hosts and known hosts."""
