"""Hosts of the roles: ``inline`` runs them in threads of this process."""
