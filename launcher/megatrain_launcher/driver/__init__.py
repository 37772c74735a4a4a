"""The driver: one elected host decides which hosts train, and responds to failures.

`decide` is pure: it takes the state as read from etcd, the time and the policy, and returns actions and a reason.
`driver` is the thin loop around it: campaign, watch, decide, write.
"""
