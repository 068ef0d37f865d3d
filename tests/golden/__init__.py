"""What this version computes, frozen, so that a change of structure cannot change it unseen."""
