package source

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/kernflux/opendsec/internal/fault"
)

// maxDepth is how deep indexes may be nested.
const maxDepth = 8

// fetch returns the bytes of a manifest or index, with its digest checked.
type fetch func(context.Context, v1.Descriptor) ([]byte, error)

// imageTypes are the artifact types that stand for a container image.
var imageTypes = []string{"", string(types.OCIConfigJSON), string(types.DockerConfigJSON)}

// chooser finds the manifest for one architecture.
type chooser struct {
	arch   string
	fetch  fetch    // of manifests and indexes
	config fetch    // of configurations
	seen   []string // platforms that do not fit, for the error
}

// chosen is a manifest and its digest.
type chosen struct {
	digest   string
	manifest *v1.Manifest
}

// document is what an index and a manifest have in common, to tell them apart
// by content: media types are often missing or wrong.
type document struct {
	SchemaVersion int             `json:"schemaVersion"`
	Manifests     []v1.Descriptor `json:"manifests"`
	Config        *v1.Descriptor  `json:"config"`
}

// choose returns the first manifest below desc that fits. raw is desc's content.
func (c *chooser) choose(ctx context.Context, raw []byte) (*chosen, error) {
	found, err := c.walk(ctx, raw, 0)
	if err != nil || found != nil {
		return found, err
	}
	slices.Sort(c.seen)
	has := strings.Join(slices.Compact(c.seen), ", ")
	return nil, fault.Invalid("source", "the image has nothing for linux/%s; it has %s", c.arch, orDefault(has, "no platform at all"))
}

func (c *chooser) walk(ctx context.Context, raw []byte, depth int) (*chosen, error) {
	if depth > maxDepth {
		return nil, fault.Invalid("source", "the image's indexes are nested more than %d deep", maxDepth)
	}
	var doc document
	if err := json.Unmarshal(raw, &doc); err != nil {
		return nil, fault.Invalid("source", "the image's manifest is no JSON: %w", err)
	}
	if doc.Config != nil {
		m, err := v1.ParseManifest(bytes.NewReader(raw))
		if err != nil {
			return nil, fault.Invalid("source", "read the image's manifest: %w", err)
		}
		return &chosen{digest: digestOf(raw), manifest: m}, nil
	}
	if doc.Manifests == nil {
		return nil, fault.Invalid("source", "the image's manifest has schema version %d, which is too old or no image", doc.SchemaVersion)
	}
	for _, d := range doc.Manifests {
		found, err := c.child(ctx, d, depth)
		if err != nil || found != nil {
			return found, err
		}
	}
	return nil, nil
}

// child looks at one entry of an index; nil means that it does not fit.
func (c *chooser) child(ctx context.Context, d v1.Descriptor, depth int) (*chosen, error) {
	if d.Annotations["vnd.docker.reference.type"] != "" || !slices.Contains(imageTypes, d.ArtifactType) {
		return nil, nil // an attestation or another artifact
	}
	if p := d.Platform; p != nil && (p.OS != "" || p.Architecture != "") {
		if p.OS != "linux" || p.Architecture != c.arch {
			c.seen = append(c.seen, p.OS+"/"+p.Architecture)
			return nil, nil
		}
	}
	raw, err := c.fetch(ctx, d)
	if err != nil {
		return nil, err
	}
	found, err := c.walk(ctx, raw, depth+1)
	if err != nil || found == nil || d.Platform != nil {
		return found, err
	}
	// The index says nothing of the platform, but the configuration does.
	cfg, err := c.configOf(ctx, found.manifest)
	if err != nil {
		return nil, err
	}
	if orDefault(cfg.OS, "linux") != "linux" || orDefault(cfg.Architecture, c.arch) != c.arch {
		c.seen = append(c.seen, cfg.OS+"/"+cfg.Architecture)
		return nil, nil
	}
	return found, nil
}

// configOf reads a manifest's configuration.
func (c *chooser) configOf(ctx context.Context, m *v1.Manifest) (*v1.ConfigFile, error) {
	raw, err := c.config(ctx, m.Config)
	if err != nil {
		return nil, fmt.Errorf("read the image's configuration: %w", err)
	}
	return parseConfig(raw)
}

func parseConfig(raw []byte) (*v1.ConfigFile, error) {
	cfg, err := v1.ParseConfigFile(bytes.NewReader(raw))
	if err != nil {
		return nil, fault.Invalid("source", "read the image's configuration: %w", err)
	}
	return cfg, nil
}
