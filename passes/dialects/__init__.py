"""How the same mathematics is spelled: one folder per dialect, one file per family."""
