"""CPU templates: one file per group of closely related ops, each exporting `TEMPLATES`.

The C++ of a template is a jinja text under `cxx/`, compiled at first use by `native.py`.
"""
