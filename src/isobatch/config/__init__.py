"""The typed configuration: one tree, checked in one place, before any device is touched.

Hydra composes plain data from conf/ (plain.py); `load` turns it into dataclasses (loading.py, schema.py). A name in the data
reaches a class only through the group's table (tables.py), so a config read from a run, a checkpoint or a server can never
name code to run.
"""

from isobatch.config.loading import check_inputs, load, options, refuse_interpolations, typed
from isobatch.config.plain import conf_folder, flat, plain_config, read_conf, resolved, to_yaml
from isobatch.config.schema import BatchOptions, Config, CostOptions, Settings, SweepOptions
from isobatch.config.tables import TABLES

__all__ = [
    "TABLES",
    "BatchOptions",
    "Config",
    "CostOptions",
    "Settings",
    "SweepOptions",
    "check_inputs",
    "conf_folder",
    "flat",
    "load",
    "options",
    "plain_config",
    "read_conf",
    "refuse_interpolations",
    "resolved",
    "to_yaml",
    "typed",
]
