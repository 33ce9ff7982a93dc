-- Which of the changes of its network rules, in the order of its node, a
-- sandbox's record has; 0 for the rules that it was made with.

-- +goose Up
ALTER TABLE sandboxes ADD COLUMN network_revision BIGINT NOT NULL DEFAULT 0;

-- +goose Down
ALTER TABLE sandboxes DROP COLUMN network_revision;
