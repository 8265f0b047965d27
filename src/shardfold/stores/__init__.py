"""STORES: where flats rest and how they come and go. One file per tier."""
