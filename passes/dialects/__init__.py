"""How the same mathematics is spelled: one folder per dialect, one file per family."""

#: Larger spellings first: a dialect that writes a family in more steps comes before one whose form is a part of it.
ORDER = ("common", "transformers_v4", "deepseek_v41")
