"""The driver: one elected host that decides who trains, and what is done when something breaks.

`decide` is pure: the state as read from etcd, the time and the policy in, actions and the reason out. `driver` is the
thin loop around it: campaign, watch, decide, write.
"""
