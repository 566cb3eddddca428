"""How well rules tell a step from noise: ours and the peers' on the same histories, with the same margins."""
