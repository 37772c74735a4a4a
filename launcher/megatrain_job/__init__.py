"""Code about jobs that the launcher and the diagnosis share: state in etcd, failures, devices, requests to the driver.

Loads no torch. Of megatrain it imports contracts, formatting, run_files and checkpoint_format; its commands also import
megatrain.commands.
"""
