-- Addresses of servers in a sandbox that were taken back before they expired.
-- JSON, '' for none.

-- +goose Up
ALTER TABLE sandboxes ADD COLUMN revoked_urls TEXT NOT NULL DEFAULT '';

-- +goose Down
ALTER TABLE sandboxes DROP COLUMN revoked_urls;
