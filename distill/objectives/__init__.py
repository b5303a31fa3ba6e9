"""How each kind of drafter is made and trained; one module a kind."""
