"""What launcher and diagnosis both know of a job: its state in etcd, its failures and devices, requests to its driver.

Loads no torch. Of megatrain it imports contracts and formatting only; its commands also use what all commands share.
"""
