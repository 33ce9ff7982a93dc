package source

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"path"
	"regexp"
	"slices"
	"strings"

	"github.com/google/go-containerregistry/pkg/name"

	"github.com/kernflux/opendsec/internal/fault"
)

// saved is one image in manifest.json of "docker save".
type saved struct {
	Config   string
	RepoTags []string
	Layers   []string
}

// openDockerArchive opens an image of a "docker save" archive. Such an image
// has no manifest of its own, so it is known by its configuration's digest,
// as at Docker.
func openDockerArchive(file, tag string, o Options) (*Image, error) {
	t, err := openTar(file, o.TempDir)
	if err != nil {
		return nil, err
	}
	img, err := dockerImage(t, tag, o)
	if err != nil {
		return nil, errors.Join(err, t.Close())
	}
	img.close = t.Close
	return img, nil
}

func dockerImage(t *tarFiles, tag string, o Options) (*Image, error) {
	raw, err := t.document("manifest.json")
	if err != nil {
		return nil, err
	}
	var all []saved
	if err := json.Unmarshal(raw, &all); err != nil {
		return nil, fault.Invalid("source", "manifest.json of the archive is no JSON: %w", err)
	}
	m, err := pick(all, tag)
	if err != nil {
		return nil, err
	}
	config, err := t.document(m.Config)
	if err != nil {
		return nil, err
	}
	img := &Image{Digest: digestOf(config)}
	if want := namedDigest(m.Config); want != "" {
		if err := checkDigest(config, "the image's configuration", want); err != nil {
			return nil, err
		}
	}
	if img.Config, err = parseConfig(config); err != nil {
		return nil, err
	}
	for _, member := range m.Layers {
		r, size, err := t.open(member)
		if err != nil {
			return nil, fault.Invalid("source", "the archive has no layer %s: %w", member, err)
		}
		if err := r.Close(); err != nil {
			return nil, err
		}
		img.Layers = append(img.Layers, Layer{
			Size: size,
			Open: func(context.Context) (io.ReadCloser, error) {
				r, _, err := t.open(member)
				return r, err
			},
		})
	}
	return img.complete(o)
}

// pick returns the image that a tag means; without a tag the only one.
func pick(all []saved, tag string) (saved, error) {
	var tags []string
	for _, m := range all {
		tags = append(tags, m.RepoTags...)
		if tag != "" && slices.ContainsFunc(m.RepoTags, func(t string) bool { return sameTag(t, tag) }) {
			return m, nil
		}
	}
	switch has := orDefault(strings.Join(tags, ", "), "no tags"); {
	case tag != "":
		return saved{}, fault.Invalid("source", "the archive has no image %q; it has %s", tag, has)
	case len(all) == 0:
		return saved{}, fault.Invalid("source", "the archive has no image")
	case len(all) > 1:
		return saved{}, fault.Invalid("source", "the archive has %d images; name one with :TAG; it has %s", len(all), has)
	}
	return all[0], nil
}

// sameTag reports whether two spellings mean one tag, as "python:3.12" and
// "docker.io/library/python:3.12" do. A bare word means the part after the colon.
func sameTag(have, want string) bool {
	if have == want || strings.HasSuffix(have, ":"+want) && !strings.ContainsAny(want, ":/") {
		return true
	}
	h, err1 := name.NewTag(have)
	w, err2 := name.NewTag(want)
	return err1 == nil && err2 == nil && h.Name() == w.Name()
}

var hexName = regexp.MustCompile(`^(?:sha256:)?([0-9a-f]{64})(?:\.json)?$`)

// namedDigest returns the digest that a member's name claims, or "".
func namedDigest(member string) string {
	m := hexName.FindStringSubmatch(path.Base(member))
	if m == nil {
		return ""
	}
	return "sha256:" + m[1]
}

func (t *tarFiles) document(member string) ([]byte, error) {
	r, _, err := t.open(member)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fault.Invalid("source", "this is no archive of \"docker save\": it has no %q", member)
	}
	if err != nil {
		return nil, err
	}
	defer r.Close()
	return readDocument(r, member)
}
