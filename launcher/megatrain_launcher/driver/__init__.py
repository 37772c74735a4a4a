"""The driver: one elected host decides which hosts train, and responds to failures.

`decide` is a pure function: it takes the state as read from etcd, the time and the policy, and returns actions and a
reason. `driver` and `term` run the loop around it: campaign, watch, decide, write.
"""
