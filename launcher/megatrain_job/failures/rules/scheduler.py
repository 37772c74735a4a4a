"""Jobs that another program or a person ended: Slurm, Kubernetes, LSF, PBS, spot instances, and requests to stop."""

from __future__ import annotations

from megatrain_job.failures.rule import ENDED_BY_OTHERS, EXIT_CODE, SIGNAL_FROM_OUTSIDE, Rule, rule
from megatrain_job.failures.verdict import Label

RULES: tuple[Rule, ...] = (
    rule(
        "slurm-ended", Label.PREEMPTION, ENDED_BY_OTHERS,
        "due to time limit", "due to preemption", "due to node failure",
        "job & has been requeued", "due to job requeue", "requeued due to", "cancelled by & slurm",
        "state=preempted", "state=timeout", "job & preempted", "job & timelimit", "job reached time limit",
        "node_fail", "due to node_fail", "node failure on", "aborting job & signal & time limit",
        "job time limit exceeded", "exceeded its time limit", "walltime & exceeded", "exceeded walltime",
        "job exceeded resource limit walltime", "term_runlimit", "term_preempt", "job killed: walltime",
        "sigusr & time limit", "about to reach its time limit", "requeueing job", "scontrol requeue",
        culprit=r"\bon (?P<host>[\w.-]+) (?:cancelled|failed)|node failure on (?P<host2>[\w.-]+)|"
                r"(?P<host3>[\w.-]+) failed",
    ),
    # Cancelled by a person, or because a task failed: an earlier line of a task is the cause, a later one an effect.
    rule(
        "slurm-cancelled", Label.PREEMPTION, EXIT_CODE + 2, "slurmstepd: error: *** & cancelled at",
        unless=r"due to (?:time limit|preemption|node failure|job requeue)", names_own_rank=False,
    ),
    rule(
        "pod-evicted", Label.PREEMPTION, ENDED_BY_OTHERS,
        "evicted", "preempted", "node was low on resource", "terminated due to & preemption",
        "taintmanagereviction", "marked for deletion by taint", "deleted by taint manager",
        "taint-manager & deleting", "disruptiontarget", "preemptionbyscheduler", "nodeshutdown",
        "node is shutting down", "terminationbykubelet", "deletionbytaintmanager", "evictionbyevictionapi",
        "pod was terminated in response to imminent", "diskpressure", "memorypressure", "scaledown",
        "node & notready & pod", "deletionbypodgc", "node & cordoned", "nodenotready", "node is not ready",
        unless=r"uncordon|rejoined|mds|lustre|cache|kv|block|image|oom|\b0 preempted",
        culprit=r"evicted +(?P<host>[\w.-]*\w\d[\w.-]*) |node (?P<host2>[\w.-]*\d[\w.-]*)\b",
    ),
    rule(
        "spot-reclaimed", Label.PREEMPTION, ENDED_BY_OTHERS,
        "spot & interruption", "spot instance & terminat", "spot & reclaim", "instance-action & terminate",
        "spot itn", "terminationnotice", "termination notice", "instance was preempted", "preemptible & terminat",
        "preemption notice", "preemption & detected", "preemption & received", "compute.instances.preempted",
        "maintenance event & terminate", "host maintenance & terminate", "rebalance recommendation",
        "eventtype & preempt", "scheduledevents & preempt", "scheduledevents & terminate",
        "system is going down for", "acpi & shutdown", "preemption signal", "being preempted",
        "instance is being & terminat", "upcoming-maintenance", "will be preempted",
        "terminate_on_host_maintenance",
        unless=r"\b(?:no|not) (?:preempt|spot|interruption)|polling|watching|listening|handler",
    ),
    rule(
        "agent-got-signal", Label.PREEMPTION, SIGNAL_FROM_OUTSIDE + 2,
        "got signal:", "death signal", "signalexception",
        pattern=r"got signal: (?:15|1|10|12)\b|sigterm death signal|sighup death signal|received \d+ death signal|"
                r"sig(?:term|hup): \d+>? death signal|sigusr\d.{0,12}death signal|signals?\.sig(?:term|hup)",
    ),
    rule(
        "interrupted-by-hand", Label.PREEMPTION, SIGNAL_FROM_OUTSIDE + 1,
        "got signal:", "keyboardinterrupt", "sigint & death signal",
        pattern=r"got signal: 2\b|^\S*\s*KeyboardInterrupt|sigint",
    ),
    rule(
        "program-got-signal", Label.PREEMPTION, SIGNAL_FROM_OUTSIDE,
        "sigterm", "sigusr", "terminated", "signal", "sighup", "saved and stopped", "exitcode", "exit code",
        "saving & before exit",
        pattern=r"(?:received|caught|got|handling|trapped|stopping on|exiting on) (?:a |"
                r"the )?(?:signal )?['\"(]?(?:signals\.)?"
                r"sig(?:term|usr\d|hup)\b|"
                r"signal (?:15|10|12) (?:received|caught|\(sig)|(?:received|caught|got) signal:? *(?:15|10|12)\b|"
                r"srun: error: .*: terminated|(?:exitcode|exit code)\W*(?:-15|143)\b|^\s*terminated\s*$|"
                r"srun: (?:forcing job termination|got sig)|exited on signal 15|sigterm received|sigusr\d received",
        unless=r"closing process|closing signal|sending process|sent|all processes|killing",
        names_own_rank=False,
    ),
)  # fmt: skip
