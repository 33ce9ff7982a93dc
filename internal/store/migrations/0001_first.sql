-- Both databases run this file: only types and words that both know.
-- Times are microseconds since 1970 in UTC, 0 for none. JSON is text that
-- only our code reads; whatever a query looks at is a column.

-- +goose Up
CREATE TABLE projects (
    path            TEXT PRIMARY KEY,
    quota_sandboxes BIGINT,
    quota_cpu       DOUBLE PRECISION,
    quota_memory_mb BIGINT,
    created_at      BIGINT NOT NULL
);

CREATE TABLE callers (
    name       TEXT PRIMARY KEY,
    created_at BIGINT NOT NULL
);

CREATE TABLE grants (
    caller  TEXT NOT NULL REFERENCES callers (name) ON DELETE CASCADE,
    project TEXT NOT NULL REFERENCES projects (path) ON DELETE CASCADE,
    role    TEXT NOT NULL,
    PRIMARY KEY (caller, project)
);
CREATE INDEX grants_project ON grants (project);

CREATE TABLE tokens (
    id          TEXT PRIMARY KEY,
    caller      TEXT NOT NULL REFERENCES callers (name) ON DELETE CASCADE,
    hash        TEXT NOT NULL,
    description TEXT NOT NULL,
    created_at  BIGINT NOT NULL,
    expires_at  BIGINT NOT NULL,
    revoked_at  BIGINT NOT NULL
);
CREATE INDEX tokens_caller ON tokens (caller);

CREATE TABLE nodes (
    name      TEXT PRIMARY KEY,
    address   TEXT NOT NULL,
    report    TEXT NOT NULL,
    last_seen BIGINT NOT NULL,
    drained   BOOLEAN NOT NULL
);

CREATE TABLE sandboxes (
    id           TEXT PRIMARY KEY,
    project      TEXT NOT NULL REFERENCES projects (path),
    caller       TEXT NOT NULL,
    state        TEXT NOT NULL,
    node         TEXT NOT NULL,
    image_digest TEXT NOT NULL,
    spec         TEXT NOT NULL,
    cpu          DOUBLE PRECISION NOT NULL,
    memory_mb    BIGINT NOT NULL,
    disk_mb      BIGINT NOT NULL,
    created_at   BIGINT NOT NULL,
    started_at   BIGINT NOT NULL,
    ended_at     BIGINT NOT NULL,
    end_reason   TEXT NOT NULL,
    end_domain   TEXT NOT NULL,
    end_detail   TEXT NOT NULL,
    version      BIGINT NOT NULL
);
CREATE INDEX sandboxes_newest ON sandboxes (created_at, id);
CREATE INDEX sandboxes_project ON sandboxes (project);
CREATE INDEX sandboxes_ended ON sandboxes (ended_at) WHERE ended_at > 0;
-- Admission sums over this index alone.
CREATE INDEX sandboxes_live ON sandboxes (node, project, cpu, memory_mb, disk_mb)
    WHERE state NOT IN ('stopped', 'failed');
CREATE INDEX sandboxes_live_digest ON sandboxes (image_digest)
    WHERE state NOT IN ('stopped', 'failed');

CREATE TABLE sandbox_labels (
    sandbox TEXT NOT NULL REFERENCES sandboxes (id) ON DELETE CASCADE,
    name    TEXT NOT NULL,
    value   TEXT NOT NULL,
    PRIMARY KEY (sandbox, name)
);
CREATE INDEX sandbox_labels_value ON sandbox_labels (name, value);

CREATE TABLE idempotency (
    caller       TEXT NOT NULL,
    project      TEXT NOT NULL,
    key          TEXT NOT NULL,
    request_hash TEXT NOT NULL,
    sandboxes    TEXT NOT NULL,
    created_at   BIGINT NOT NULL,
    PRIMARY KEY (caller, project, key)
);
CREATE INDEX idempotency_created ON idempotency (created_at);

CREATE TABLE images (
    project      TEXT NOT NULL REFERENCES projects (path),
    repo         TEXT NOT NULL,
    tag          TEXT NOT NULL,
    digest       TEXT NOT NULL,
    kind         TEXT NOT NULL,
    size         BIGINT NOT NULL,
    architecture TEXT NOT NULL,
    source       TEXT NOT NULL,
    config       TEXT NOT NULL,
    created_at   BIGINT NOT NULL,
    PRIMARY KEY (project, repo, tag)
);
CREATE INDEX images_digest ON images (digest);

CREATE TABLE audit (
    time     BIGINT NOT NULL,
    caller   TEXT NOT NULL,
    token_id TEXT NOT NULL,
    action   TEXT NOT NULL,
    subject  TEXT NOT NULL,
    outcome  TEXT NOT NULL
);
CREATE INDEX audit_time ON audit (time);

-- +goose Down
DROP TABLE audit;
DROP TABLE images;
DROP TABLE idempotency;
DROP TABLE sandbox_labels;
DROP TABLE sandboxes;
DROP TABLE nodes;
DROP TABLE tokens;
DROP TABLE grants;
DROP TABLE callers;
DROP TABLE projects;
