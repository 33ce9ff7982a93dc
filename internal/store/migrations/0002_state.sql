-- What pause, fork and snapshots record. What a sandbox counts for in
-- placement is in columns of its own names now, because a paused one counts for
-- less than its limits. Before this nothing was paused, so the limits that are
-- there are what each sandbox holds; the index follows its columns' names.

-- +goose Up
ALTER TABLE sandboxes RENAME COLUMN cpu TO held_cpu;
ALTER TABLE sandboxes RENAME COLUMN memory_mb TO held_memory_mb;
ALTER TABLE sandboxes RENAME COLUMN disk_mb TO held_disk_mb;
ALTER TABLE sandboxes ADD COLUMN parent TEXT NOT NULL DEFAULT '';
ALTER TABLE sandboxes ADD COLUMN paused_at BIGINT NOT NULL DEFAULT 0;
ALTER TABLE sandboxes ADD COLUMN paused_for BIGINT NOT NULL DEFAULT 0; -- microseconds
ALTER TABLE images ADD COLUMN snapshot TEXT NOT NULL DEFAULT '';

-- +goose Down
ALTER TABLE images DROP COLUMN snapshot;
ALTER TABLE sandboxes DROP COLUMN paused_for;
ALTER TABLE sandboxes DROP COLUMN paused_at;
ALTER TABLE sandboxes DROP COLUMN parent;
ALTER TABLE sandboxes RENAME COLUMN held_disk_mb TO disk_mb;
ALTER TABLE sandboxes RENAME COLUMN held_memory_mb TO memory_mb;
ALTER TABLE sandboxes RENAME COLUMN held_cpu TO cpu;
