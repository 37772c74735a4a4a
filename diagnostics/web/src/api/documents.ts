// Made by generate_documents.py from every document.py of the dashboard: change those, then run `make web`.
// Times are unix seconds, durations seconds, ratios parts of one; null is "not known".

export interface ActionRequest {
  kind: "checkpoint" | "restart" | "stop" | "evict" | "cordon" | "uncordon" | "approve" | "dismiss" | "diag-on" | "diag-off";
  target?: string;
  reason: string;
  confirmation: string;
  is_dry_run?: boolean;
  idempotency_key: string;
}

export interface ActionAnswer {
  action_id: string;
  is_dry_run: boolean;
  is_accepted: boolean;
  is_done: boolean;
  text: string;
}

export interface ErrorDocument {
  error: string;
  text: string;
}

export interface AxisDocument {
  name: string;
  word: string;
  size: number;
  stride: number;
}

export interface LayoutDocument {
  axes: readonly AxisDocument[];
  world_size: number;
}

export interface ThresholdsDocument {
  excess: number;
  score: number;
  num_steps: number;
}

export interface AuditEntryDocument {
  at_unix_s: number;
  source: string;
  actor: string;
  action: string;
  target: string;
  reason: string;
  result: string;
  entry_hash: string;
}

export interface AuditDocument {
  entries: readonly AuditEntryDocument[];
  chain_problem: string;
}

export interface CheckpointDocument {
  branch: string;
  step: number;
  place: string;
  state: string;
  is_in_line: boolean;
  is_resume_point: boolean;
  num_bytes: number | null;
  written_unix_s: number | null;
  consumed_tokens: number | null;
  round: number | null;
  pin_reason: string;
  problem: string;
  verified_unix_s: number | null;
  verify_result: string;
}

export interface BranchDocument {
  name: string;
  parent: string;
  parent_step: number | null;
  created_unix_s: number | null;
  reason: string;
  is_current: boolean;
}

export interface CheckpointsDocument {
  place: string;
  resume_reason: string;
  branches: readonly BranchDocument[];
  checkpoints: readonly CheckpointDocument[];
  num_elsewhere: number;
}

export interface ComparedRun {
  name: string;
  job: string;
  first_step: number | null;
  last_step: number | null;
  loss: readonly (number | null)[];
  step_s: readonly (number | null)[];
  tokens_per_s: readonly (number | null)[];
  mfu: readonly (number | null)[];
  common_loss: number | null;
  median_step_s: number | null;
  median_tokens_per_s: number | null;
  median_mfu: number | null;
  num_ranks: number | null;
  num_incidents: number;
  effective_time_ratio: number | null;
  training_s: number | null;
  is_sampled: boolean;
  problems: readonly string[];
}

export interface ConfigDifference {
  key: string;
  values: readonly (string | null)[];
}

export interface CompareDocument {
  at_unix_s: number;
  stride: number;
  step: readonly number[];
  common_step: number | null;
  runs: readonly ComparedRun[];
  differences: readonly ConfigDifference[];
  num_same: number;
}

export interface GpuDocument {
  gpu: number;
  uuid: string;
  rank: number | null;
  at_unix_s: number;
  error: string;
  recovery: string;
  throttled: string;
  fault: string;
  temperature_c: number | null;
  slowdown_temperature_c: number | null;
  memory_temperature_c: number | null;
  sm_clock_mhz: number | null;
  max_sm_clock_mhz: number | null;
  memory_clock_mhz: number | null;
  power_w: number | null;
  power_limit_w: number | null;
  memory_used_bytes: number | null;
  memory_total_bytes: number | null;
  utilization: number | null;
  corrected_errors: number | null;
  uncorrected_errors: number | null;
  lifetime_corrected_errors: number | null;
  lifetime_uncorrected_errors: number | null;
  retired_pages: number | null;
  corrected_rows: number | null;
  uncorrected_rows: number | null;
  is_reset_pending: boolean;
  has_remap_failed: boolean;
  nvlink_errors: number | null;
  pcie_replays: number | null;
  temperature_history: readonly (number | null)[];
  clock_history: readonly (number | null)[];
  power_history: readonly (number | null)[];
}

export interface LinkDocument {
  link: string;
  at_unix_s: number;
  is_up: boolean;
  state: string;
  speed_mbps: number | null;
  downs: number | null;
  rx_errors: number | null;
  tx_errors: number | null;
  rx_dropped: number | null;
  tx_dropped: number | null;
  symbol_errors: number | null;
  retransmissions: number | null;
  error_history: readonly (number | null)[];
}

export interface XidDocument {
  at_unix_s: number;
  gpu: number | null;
  rank: number | null;
  step: number | null;
  xid: number;
  meaning: string;
  kind: string;
  advice: string;
}

export interface HostDevicesDocument {
  host: string;
  first_unix_s: number | null;
  last_unix_s: number | null;
  trouble: string;
  gpus: readonly GpuDocument[];
  links: readonly LinkDocument[];
  xids: readonly XidDocument[];
}

export interface HealthDocument {
  is_ready: boolean;
}

export interface HeatCellDocument {
  round: number;
  operation: string;
  measure: string;
  rank: number;
  host: string;
  place: Record<string, number>;
  step: number;
  unit: string;
  value: number | null;
  peers_median: number | null;
  peers_spread: number | null;
  num_peers: number;
  ratio: number | null;
  z: number | null;
}

export interface HeatOutlierDocument {
  rank: number;
  host: string;
  place: Record<string, number>;
  step: number;
  value: number;
  peers_median: number;
  ratio: number | null;
  z: number;
  num_steps: number;
}

export interface HeatOutliersDocument {
  round: number;
  operation: string;
  measure: string;
  unit: string;
  far_z: number;
  first_step: number | null;
  last_step: number | null;
  outliers: readonly HeatOutlierDocument[];
}

export interface HostDocument {
  host: string;
  state: string;
  is_in_order: boolean;
  is_driver: boolean;
  remark: string;
  address: string;
  hardware: string;
  labels: Record<string, string>;
  first_rank: number | null;
  num_workers: number | null;
  step: number | null;
  median_step_s: number | null;
  last_step_unix_s: number | null;
  joined_unix_s: number | null;
  straggler_score: number | null;
  clock_offset_s: number | null;
  clock_error_s: number | null;
  cordon_reason: string;
  cordon_by: string;
  cordon_unix_s: number | null;
  is_connected: boolean | null;
}

export interface CheckDocument {
  name: string;
  outcome: string;
  detail: string;
  duration_s: number;
  value: number | null;
  unit: string;
}

export interface HostsDocument {
  hosts: readonly HostDocument[];
  thresholds: ThresholdsDocument | null;
}

export interface HostHistoryDocument {
  host: HostDocument;
  checks: readonly CheckDocument[];
  checks_unix_s: number | null;
  incident_ids: readonly string[];
  victim_incident_ids: readonly string[];
  rounds: readonly number[];
}

export interface PhaseDocument {
  name: string;
  began_unix_s: number | null;
  seconds: number | null;
}

export interface FailureDocument {
  rank: number;
  host: string;
  exit_text: string;
  label: string;
  action: string;
  is_cascade: boolean;
  culprit: string;
  line: string;
  at_unix_s: number;
}

export interface IncidentDocument {
  incident_id: string;
  kind: string;
  kind_text: string;
  state: string;
  round: number;
  next_round: number | null;
  began_unix_s: number;
  detected_unix_s: number;
  reason: string;
  action: string;
  hosts: readonly string[];
  ranks: readonly number[];
  confidence: string;
  evidence: readonly string[];
  failures: readonly FailureDocument[];
  phases: readonly PhaseDocument[];
  down_s: number | null;
  last_step: number | null;
  resumed_step: number | null;
  steps_lost: number | null;
  effective_time_ratio: number | null;
  verdict_id: string;
  driver: string;
  notes: Record<string, string>;
}

export interface VerdictDocument {
  verdict_id: string;
  kind: string;
  cause: string;
  confidence: string;
  round: number;
  created_unix_s: number;
  hosts: readonly string[];
  ranks: readonly number[];
  evidence: readonly string[];
  first_step: number | null;
  last_step: number | null;
  step_s: number | null;
  gain_s_per_step: number;
  outcome: string;
  outcome_reason: string;
  outcome_by: string;
  outcome_unix_s: number | null;
  gain_s: number;
  price_s: number;
  incident_id: string;
}

export interface DamagedIncidentDocument {
  incident_id: string;
  text: string;
}

export interface IncidentsDocument {
  incidents: readonly IncidentDocument[];
  verdicts: readonly VerdictDocument[];
  damaged: readonly DamagedIncidentDocument[];
}

export interface HappenedDocument {
  at_unix_s: number;
  what: "fault" | "noticed" | "verdict" | "decision" | "step" | "over" | "told" | "not-told";
  text: string;
}

export interface SensibleActionDocument {
  kind: "checkpoint" | "restart" | "stop" | "evict" | "cordon" | "uncordon" | "approve" | "dismiss" | "diag-on" | "diag-off";
  target: string;
}

export interface StoryDocument {
  incident_id: string;
  happened: readonly HappenedDocument[];
  told: readonly HappenedDocument[];
  why_not_told: string;
  actions: readonly SensibleActionDocument[];
  runbooks: readonly string[];
}

export interface IncidentLineDocument {
  rank: number;
  host: string;
  at_unix_s: number;
  line: string;
  is_telling: boolean;
}

export interface IncidentLogsDocument {
  round: number;
  until_unix_s: number;
  culprit_text: string;
  culprit_lines: readonly IncidentLineDocument[];
  other_lines: readonly IncidentLineDocument[];
  label: string;
  action: string;
  telling_line: string;
  telling_rank: number | null;
  problem: string;
  log_file: string;
}

export interface RoundDocument {
  number: number;
  began_unix_s: number | null;
  world_size: number;
  first_step: number | null;
  last_step: number | null;
}

export interface OperationDocument {
  name: string;
  number: number;
  lane: string;
  is_exchange: boolean;
}

export interface JobDocument {
  job: string;
  run_directory: string;
  is_recorded: boolean;
  layout: LayoutDocument | null;
  rounds: readonly RoundDocument[];
  operations: readonly OperationDocument[];
  role: "viewer" | "operator";
  can_act: boolean;
  why_not_act: string;
  has_session: boolean;
  perfetto_url: string;
  version: string;
}

export interface RowReason {
  code: string;
  level: "green" | "amber" | "red";
  text: string;
}

export interface JobRow {
  name: string;
  job: string;
  trouble: "red" | "amber" | "green" | "ended";
  level: "green" | "amber" | "red";
  state: string;
  headline: string;
  reasons: readonly RowReason[];
  num_reasons: number;
  problems: readonly string[];
  is_live: boolean;
  is_over: boolean;
  step: number | null;
  train_steps: number | null;
  remaining_s: number | null;
  loss: number | null;
  loss_line: readonly (number | null)[];
  step_s: number | null;
  step_s_line: readonly (number | null)[];
  tokens_per_s: number | null;
  mfu: number | null;
  effective_time_ratio: number | null;
  training_s: number | null;
  saved_step: number | null;
  saved_unix_s: number | null;
  num_hosts: number | null;
  num_ranks: number | null;
  num_incidents: number;
  began_unix_s: number | null;
  ended_unix_s: number | null;
  run_directory: string;
  why_not_opened: string;
  url: string;
}

export interface TroubleCounts {
  red: number;
  amber: number;
  green: number;
  ended: number;
}

export interface JobsDocument {
  at_unix_s: number;
  runs_directory: string;
  jobs: readonly JobRow[];
  num_found: number;
  counts: TroubleCounts;
  problems: readonly string[];
  look_s: number;
  role: "viewer" | "operator";
  has_session: boolean;
  version: string;
}

export interface LiveDocument {
  session: string;
  at_unix_s: number;
  step: number | null;
  versions: Record<string, number>;
}

export interface LogLineDocument {
  rank: number;
  host: string;
  at_unix_s: number;
  line: string;
}

export interface LogLinesDocument {
  round: number;
  num_matching: number;
  num_searched: number;
  lines: readonly LogLineDocument[];
  is_partial: boolean;
}

export interface LogCauseDocument {
  rank: number;
  host: string;
  label: string;
  action: string;
  role: string;
  culprit: string;
  rule: string;
  line: string;
  at_unix_s: number;
}

export interface LogVerdictDocument {
  round: number;
  label: string;
  action: string;
  culprit: string;
  reason: string;
  root_rank: number | null;
  root_text: string;
  incident_id: string;
  line: string;
  num_ranks: number;
  num_lines: number;
  causes: readonly LogCauseDocument[];
}

export interface MarkDocument {
  kind: "incident" | "note" | "config" | "checkpoint" | "round" | "bad";
  step: number | null;
  at_unix_s: number | null;
  text: string;
  ref: string;
  count: number;
  last_step: number | null;
  last_unix_s: number | null;
}

export interface ChangedKeyDocument {
  key: string;
  before: string;
  after: string;
}

export interface ConfigChangeDocument {
  round: number;
  first_step: number;
  at_unix_s: number;
  keys: readonly ChangedKeyDocument[];
}

export interface MarksDocument {
  marks: readonly MarkDocument[];
  changes: readonly ConfigChangeDocument[];
}

export interface NoteRequest {
  text: string;
  step?: number | null;
  at_unix_s?: number | null;
  idempotency_key: string;
}

export interface RetractionRequest {
  reason: string;
  idempotency_key: string;
}

export interface NoteDocument {
  note_id: string;
  written_unix_s: number;
  user: string;
  text: string;
  step: number | null;
  at_unix_s: number | null;
  retracted_unix_s: number | null;
  retracted_by: string;
  retraction: string;
  incident_ids: readonly string[];
}

export interface NotesDocument {
  notes: readonly NoteDocument[];
  can_write: boolean;
  why_not_write: string;
}

export interface ReasonDocument {
  code: string;
  level: "green" | "amber" | "red";
  text: string;
  since_unix_s: number | null;
  runbook: string;
  hosts: readonly string[];
  ranks: readonly number[];
}

export interface HostCounts {
  total: number;
  training: number;
  spare: number;
  cordoned: number;
  unfit: number;
  lost: number;
}

export interface CheckpointAge {
  step: number;
  branch: string;
  written_unix_s: number | null;
}

export interface NextAction {
  what: string;
  why: string;
  verdict_id: string;
}

export interface DiagnosisState {
  is_daemon_alive: boolean | null;
  silent_ranks: readonly number[];
  num_silent_ranks: number;
  rows_dropped: number;
  rows_refused: number;
  problems: readonly string[];
}

export interface OverviewDocument {
  at_unix_s: number;
  state: string;
  level: "green" | "amber" | "red";
  reasons: readonly ReasonDocument[];
  headline: string;
  since_unix_s: number | null;
  round: number | null;
  step: number | null;
  last_step_unix_s: number | null;
  train_steps: number | null;
  tokens: number | null;
  loss: number | null;
  grad_norm: number | null;
  step_s: number | null;
  tokens_per_s: number | null;
  mfu: number | null;
  remaining_s: number | null;
  effective_time_ratio: number | null;
  effective_time_ratio_last_hour: number | null;
  checkpoint: CheckpointAge | null;
  hosts: HostCounts;
  num_open_incidents: number;
  num_incidents: number;
  open_incident: string;
  next_action: NextAction;
  diagnosis: DiagnosisState;
}

export interface GapDocument {
  begin_unix_s: number;
  end_unix_s: number;
  round: number;
}

export interface RangeDocument {
  first_step: number | null;
  last_step: number | null;
  begin_unix_s: number | null;
  end_unix_s: number | null;
}

export interface SeriesDocument {
  stride: number;
  step: readonly number[];
  at_unix_s: readonly (number | null)[];
  loss: readonly (number | null)[];
  loss_low: readonly (number | null)[];
  loss_high: readonly (number | null)[];
  grad_norm: readonly (number | null)[];
  grad_norm_high: readonly (number | null)[];
  step_s: readonly (number | null)[];
  step_s_low: readonly (number | null)[];
  step_s_high: readonly (number | null)[];
  tokens_per_s: readonly (number | null)[];
  mfu: readonly (number | null)[];
  round: readonly number[];
  bad_steps: readonly number[];
  gaps: readonly GapDocument[];
  range: RangeDocument;
}

export interface PeerGroupDocument {
  name: string;
  first_rank: number;
  num_ranks: number;
  stride: number;
}

export interface RankPositionDocument {
  group: string;
  entered: number;
  left: number;
}

export interface StackDocument {
  thread: string;
  at_unix_s: number;
  frames: readonly string[];
}

export interface RankDocument {
  round: number;
  rank: number;
  host: string;
  place: Record<string, number>;
  pid: number | null;
  step: number | null;
  operation: string;
  phase: string;
  process_state: string;
  score: number | null;
  least_score: number | null;
  groups: readonly PeerGroupDocument[];
  positions: readonly RankPositionDocument[];
  stacks: readonly StackDocument[];
  black_box: string;
  findings: readonly string[];
}

export interface HangSuspectDocument {
  rank: number;
  host: string;
  place: Record<string, number>;
  step: number;
  doing: string;
  evidence: string;
}

export interface HangMissingDocument {
  group: string;
  sequence: number;
  waiting: readonly number[];
  absent: readonly number[];
  silent: readonly number[];
  loitering: readonly number[];
}

export interface HangDocument {
  round: number;
  source: string;
  confidence: string;
  reason: string;
  incident_id: string;
  suspects: readonly HangSuspectDocument[];
  missing: readonly HangMissingDocument[];
  silent: readonly number[];
  waiting: readonly number[];
  stack_clusters: readonly StackClusterDocument[];
  outlier_ranks: readonly number[];
}

export interface StackClusterDocument {
  num_ranks: number;
  ranks: readonly number[];
  is_waiting: boolean;
  frames: readonly string[];
}

export interface TextDocument {
  kind: "words" | "code" | "strong" | "runbook" | "document";
  text: string;
  target: string;
}

export interface RunbookBlockDocument {
  kind: "paragraph" | "item" | "table" | "commands";
  texts: readonly TextDocument[];
  rows: readonly (readonly (readonly TextDocument[])[])[];
  commands: readonly string[];
  example: string;
}

export interface RunbookStepDocument {
  title: string;
  anchor: string;
  blocks: readonly RunbookBlockDocument[];
}

export interface RunbookDocument {
  name: string;
  title: string;
  incident_id: string;
  steps: readonly RunbookStepDocument[];
}

export interface RunbookNameDocument {
  name: string;
  title: string;
}

export interface RunbooksDocument {
  runbooks: readonly RunbookNameDocument[];
}

export interface SessionDocument {
  role: "viewer" | "operator";
  ends_unix_s: number;
}

export interface FindingDocument {
  cause: string;
  is_of_host: boolean;
  confidence: string;
  hosts: readonly string[];
  ranks: readonly number[];
  stage: number | null;
  first_step: number;
  last_step: number;
  num_seen: number;
  num_steps: number;
  is_over: boolean;
  excess: number;
  excess_s: number;
  score: number;
  gain_s: number;
  step_s: number;
  num_victims: number;
  evidence: readonly string[];
}

export interface HostScore {
  host: string;
  score: number;
}

export interface StragglersDocument {
  round: number;
  source: string;
  is_enough: boolean;
  headline: string;
  first_step: number | null;
  last_step: number | null;
  num_steps: number;
  findings: readonly FindingDocument[];
  scores: readonly HostScore[];
  thresholds: ThresholdsDocument | null;
  silent_ranks: readonly number[];
  unjudged_ranks: readonly number[];
}

export interface PartDocument {
  name: string;
  slowdown: number;
}

export interface ActionBalance {
  action: string;
  target: string;
  gain_s_per_step: number;
  gain_s: number | null;
  price_s: number | null;
  is_worth_it: boolean | null;
  text: string;
}

export interface WhatIfDocument {
  round: number;
  steps: readonly number[];
  slowdown: number;
  launch_slowdown: number;
  waste: number;
  measured_s: number;
  replayed_s: number;
  ideal_s: number;
  m_w: number;
  m_s: number;
  worst_ranks: readonly number[];
  by_operation: readonly PartDocument[];
  by_stage: readonly PartDocument[];
  by_dp_rank: readonly PartDocument[];
  slowdown_by_step: readonly number[];
  by_cause: readonly PartDocument[];
  advice: string;
  actions: readonly ActionBalance[];
  notes: readonly string[];
}

export interface FullStepDocument {
  step: number;
  num_ranks: number;
  began_unix_s: number;
  duration_s: number;
}

export interface TimelineStepsDocument {
  round: number;
  steps: readonly FullStepDocument[];
}
