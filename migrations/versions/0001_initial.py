"""The first tables."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    op.create_table(
        "environments",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("device_class", sa.String(length=16), nullable=False),
        sa.Column("device", sa.Text(), nullable=False),
        sa.Column("exact_identity", sa.String(length=64), nullable=False),
        sa.Column("numeric_identity", sa.String(length=64), nullable=False),
        sa.Column("timing_identity", sa.String(length=64), nullable=False),
        sa.Column("facts", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_environments")),
        sa.UniqueConstraint("digest", name=op.f("uq_environments_digest")),
    )
    op.create_table(
        "level_sets",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("levels", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_level_sets")),
        sa.UniqueConstraint("digest", name=op.f("uq_level_sets_digest")),
    )
    op.create_table(
        "targets",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_targets")),
        sa.UniqueConstraint("name", name=op.f("uq_targets_name")),
    )
    op.create_table(
        "branches",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("target_id", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("head_sha", sa.String(length=40), nullable=False),
        sa.ForeignKeyConstraint(["target_id"], ["targets.id"], name=op.f("fk_branches_target_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_branches")),
        sa.UniqueConstraint("target_id", "name", name=op.f("uq_branches_target_id_name")),
    )
    op.create_table(
        "commits",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("target_id", sa.Integer(), nullable=False),
        sa.Column("sha", sa.String(length=40), nullable=False),
        sa.Column("parents", sa.JSON(), nullable=False),
        sa.Column("author", sa.Text(), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("committed_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("watched_digest", sa.String(length=64), nullable=True),
        sa.Column("trusted", sa.Boolean(), nullable=False),
        sa.Column("judge_generation", sa.Integer(), nullable=False),
        sa.Column("judged_generation", sa.Integer(), nullable=False),
        sa.CheckConstraint("length(sha) = 40", name=op.f("ck_commits_sha_is_full")),
        sa.ForeignKeyConstraint(["target_id"], ["targets.id"], name=op.f("fk_commits_target_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_commits")),
        sa.UniqueConstraint("target_id", "sha", name=op.f("uq_commits_target_id_sha")),
    )
    op.create_index(op.f("ix_commits_target_id_committed_at"), "commits", ["target_id", "committed_at"], unique=False)
    op.create_table(
        "series",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("target_id", sa.Integer(), nullable=False),
        sa.Column("kernel", sa.String(length=64), nullable=False),
        sa.Column("role", sa.String(length=8), nullable=False),
        sa.Column("case_id", sa.String(length=200), nullable=False),
        sa.Column("case", sa.JSON(), nullable=False),
        sa.CheckConstraint("role IN ('kernel', 'control')", name=op.f("ck_series_role")),
        sa.ForeignKeyConstraint(["target_id"], ["targets.id"], name=op.f("fk_series_target_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_series")),
        sa.UniqueConstraint("target_id", "kernel", "case_id", name=op.f("uq_series_target_id_kernel_case_id")),
    )
    op.create_table(
        "target_versions",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("target_id", sa.Integer(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("definition", sa.JSON(), nullable=False),
        sa.Column("registered_by", sa.Text(), nullable=False),
        sa.Column("registered_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["target_id"], ["targets.id"], name=op.f("fk_target_versions_target_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_target_versions")),
        sa.UniqueConstraint("target_id", "number", name=op.f("uq_target_versions_target_id_number")),
    )
    op.create_table(
        "tokens",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("scope", sa.String(length=8), nullable=False),
        sa.Column("target_id", sa.Integer(), nullable=True),
        sa.Column("label", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("revoked_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("scope IN ('read', 'ci', 'runner', 'admin')", name=op.f("ck_tokens_scope")),
        sa.ForeignKeyConstraint(["target_id"], ["targets.id"], name=op.f("fk_tokens_target_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tokens")),
        sa.UniqueConstraint("digest", name=op.f("uq_tokens_digest")),
    )
    op.create_table(
        "findings",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("key", sa.String(length=64), nullable=False),
        sa.Column("target_id", sa.Integer(), nullable=False),
        sa.Column("commit_id", sa.Integer(), nullable=False),
        sa.Column("kernel", sa.String(length=64), nullable=False),
        sa.Column("family", sa.String(length=16), nullable=False),
        sa.Column("direction", sa.String(length=8), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("sentence", sa.Text(), nullable=False),
        sa.Column("evidence", sa.JSON(), nullable=False),
        sa.Column("decided", sa.JSON(), nullable=False),
        sa.Column("until", sa.DateTime(timezone=True), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint("direction IN ('regress', 'improve')", name=op.f("ck_findings_direction")),
        sa.CheckConstraint(
            "state IN ('open', 'acknowledged', 'accepted', 'dismissed', 'recovered', 'retracted')",
            name=op.f("ck_findings_state"),
        ),
        sa.ForeignKeyConstraint(["commit_id"], ["commits.id"], name=op.f("fk_findings_commit_id")),
        sa.ForeignKeyConstraint(["target_id"], ["targets.id"], name=op.f("fk_findings_target_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_findings")),
        sa.UniqueConstraint("key", name=op.f("uq_findings_key")),
    )
    op.create_index(op.f("ix_findings_commit_id"), "findings", ["commit_id"], unique=False)
    op.create_index(op.f("ix_findings_target_id_state"), "findings", ["target_id", "state"], unique=False)
    op.create_table(
        "jobs",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("target_id", sa.Integer(), nullable=False),
        sa.Column("commit_id", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("suite", sa.String(length=64), nullable=False),
        sa.Column("device_class", sa.String(length=16), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(length=8), nullable=False),
        sa.Column("open_key", sa.String(length=200), nullable=True),
        sa.Column("attempts_used", sa.Integer(), nullable=False),
        sa.Column("attempts_allowed", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.String(length=36), nullable=True),
        sa.Column("leased_by", sa.Text(), nullable=True),
        sa.Column("lease_expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("progress", sa.Text(), nullable=False),
        sa.Column("failure", sa.Text(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("(state = 'leased') = (lease_expires_at IS NOT NULL)", name=op.f("ck_jobs_lease")),
        sa.CheckConstraint("(state IN ('queued', 'leased')) = (open_key IS NOT NULL)", name=op.f("ck_jobs_open_key")),
        sa.CheckConstraint("state IN ('queued', 'leased', 'done', 'failed')", name=op.f("ck_jobs_state")),
        sa.CheckConstraint("attempts_used <= attempts_allowed", name=op.f("ck_jobs_attempts")),
        sa.ForeignKeyConstraint(["commit_id"], ["commits.id"], name=op.f("fk_jobs_commit_id")),
        sa.ForeignKeyConstraint(["target_id"], ["targets.id"], name=op.f("fk_jobs_target_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_jobs")),
        sa.UniqueConstraint("attempt", name=op.f("uq_jobs_attempt")),
        sa.UniqueConstraint("open_key", name=op.f("uq_jobs_open_key")),
    )
    op.create_index(op.f("ix_jobs_commit_id"), "jobs", ["commit_id"], unique=False)
    op.create_index(op.f("ix_jobs_state_priority_id"), "jobs", ["state", "priority", "id"], unique=False)
    op.create_table(
        "runners",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("token_id", sa.Integer(), nullable=True),
        sa.Column("device_class", sa.String(length=16), nullable=False),
        sa.Column("capabilities", sa.JSON(), nullable=False),
        sa.Column("registered_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("last_seen_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["token_id"], ["tokens.id"], name=op.f("fk_runners_token_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_runners")),
        sa.UniqueConstraint("name", name=op.f("uq_runners_name")),
    )
    op.create_table(
        "verdicts",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("target_id", sa.Integer(), nullable=False),
        sa.Column("commit_id", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("baseline_commit_id", sa.Integer(), nullable=True),
        sa.Column("baseline_distance", sa.Integer(), nullable=True),
        sa.Column("inherited_from_id", sa.Integer(), nullable=True),
        sa.Column("rule_version", sa.Integer(), nullable=False),
        sa.Column("counts", sa.JSON(), nullable=False),
        sa.Column("document", sa.JSON(), nullable=False),
        sa.Column("level_set_id", sa.Integer(), nullable=False),
        sa.Column("judged_at", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint(
            "state IN ('pass', 'improve', 'regress', 'inconclusive', 'no-baseline', 'missing', "
            "'incomparable', 'invalid')",
            name=op.f("ck_verdicts_state"),
        ),
        sa.ForeignKeyConstraint(["baseline_commit_id"], ["commits.id"], name=op.f("fk_verdicts_baseline_commit_id")),
        sa.ForeignKeyConstraint(["commit_id"], ["commits.id"], name=op.f("fk_verdicts_commit_id")),
        sa.ForeignKeyConstraint(["inherited_from_id"], ["commits.id"], name=op.f("fk_verdicts_inherited_from_id")),
        sa.ForeignKeyConstraint(["level_set_id"], ["level_sets.id"], name=op.f("fk_verdicts_level_set_id")),
        sa.ForeignKeyConstraint(["target_id"], ["targets.id"], name=op.f("fk_verdicts_target_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_verdicts")),
        sa.UniqueConstraint("commit_id", name=op.f("uq_verdicts_commit_id")),
    )
    op.create_table(
        "finding_events",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("finding_id", sa.Integer(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("action", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["finding_id"], ["findings.id"], name=op.f("fk_finding_events_finding_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_finding_events")),
    )
    op.create_index(op.f("ix_finding_events_finding_id"), "finding_events", ["finding_id"], unique=False)
    op.create_table(
        "job_attempts",
        sa.Column("attempt", sa.String(length=36), nullable=False),
        sa.Column("job_id", sa.Integer(), nullable=False),
        sa.Column("runner_id", sa.Integer(), nullable=False),
        sa.Column("leased_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_job_attempts_job_id")),
        sa.ForeignKeyConstraint(["runner_id"], ["runners.id"], name=op.f("fk_job_attempts_runner_id")),
        sa.PrimaryKeyConstraint("attempt", name=op.f("pk_job_attempts")),
    )
    op.create_index(op.f("ix_job_attempts_job_id"), "job_attempts", ["job_id"], unique=False)
    op.create_table(
        "runs",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.String(length=36), nullable=False),
        sa.Column("body_digest", sa.String(length=64), nullable=False),
        sa.Column("target_id", sa.Integer(), nullable=False),
        sa.Column("commit_id", sa.Integer(), nullable=False),
        sa.Column("job_id", sa.Integer(), nullable=True),
        sa.Column("environment_id", sa.Integer(), nullable=False),
        sa.Column("suite", sa.String(length=64), nullable=False),
        sa.Column("suite_digest", sa.String(length=64), nullable=True),
        sa.Column("posted_by", sa.Text(), nullable=False),
        sa.Column("volatile", sa.JSON(), nullable=False),
        sa.Column("quarantined", sa.Boolean(), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("received_at", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint("finished_at >= started_at", name=op.f("ck_runs_ends_after_start")),
        sa.ForeignKeyConstraint(["commit_id"], ["commits.id"], name=op.f("fk_runs_commit_id")),
        sa.ForeignKeyConstraint(["environment_id"], ["environments.id"], name=op.f("fk_runs_environment_id")),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_runs_job_id")),
        sa.ForeignKeyConstraint(["target_id"], ["targets.id"], name=op.f("fk_runs_target_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_runs")),
        sa.UniqueConstraint("attempt", name=op.f("uq_runs_attempt")),
    )
    op.create_index(op.f("ix_runs_commit_id"), "runs", ["commit_id"], unique=False)
    op.create_table(
        "measurements",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("series_id", sa.Integer(), nullable=False),
        sa.Column("outcome", sa.String(length=16), nullable=False),
        sa.Column("inputs_digest", sa.String(length=64), nullable=True),
        sa.Column("samples", sa.LargeBinary(), nullable=False),
        sa.Column("notes", sa.JSON(), nullable=True),
        sa.CheckConstraint(
            "outcome IN ('ok', 'unmeasurable', 'raised', 'out_of_memory', 'killed', 'timeout', 'exited', 'garbage')",
            name=op.f("ck_measurements_outcome"),
        ),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_measurements_run_id")),
        sa.ForeignKeyConstraint(["series_id"], ["series.id"], name=op.f("fk_measurements_series_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_measurements")),
        sa.UniqueConstraint("run_id", "series_id", name=op.f("uq_measurements_run_id_series_id")),
    )
    op.create_index(op.f("ix_measurements_series_id_run_id"), "measurements", ["series_id", "run_id"], unique=False)


def downgrade() -> None:
    """Revert."""
    op.drop_index(op.f("ix_measurements_series_id_run_id"), table_name="measurements")
    op.drop_table("measurements")
    op.drop_index(op.f("ix_runs_commit_id"), table_name="runs")
    op.drop_table("runs")
    op.drop_index(op.f("ix_job_attempts_job_id"), table_name="job_attempts")
    op.drop_table("job_attempts")
    op.drop_index(op.f("ix_finding_events_finding_id"), table_name="finding_events")
    op.drop_table("finding_events")
    op.drop_table("verdicts")
    op.drop_table("runners")
    op.drop_index(op.f("ix_jobs_state_priority_id"), table_name="jobs")
    op.drop_index(op.f("ix_jobs_commit_id"), table_name="jobs")
    op.drop_table("jobs")
    op.drop_index(op.f("ix_findings_target_id_state"), table_name="findings")
    op.drop_index(op.f("ix_findings_commit_id"), table_name="findings")
    op.drop_table("findings")
    op.drop_table("tokens")
    op.drop_table("target_versions")
    op.drop_table("series")
    op.drop_index(op.f("ix_commits_target_id_committed_at"), table_name="commits")
    op.drop_table("commits")
    op.drop_table("branches")
    op.drop_table("targets")
    op.drop_table("level_sets")
    op.drop_table("environments")
