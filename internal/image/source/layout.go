package source

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"slices"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/kernflux/opendsec/internal/fault"
)

// refName is the annotation of index.json that holds an image's tag.
const refName = "org.opencontainers.image.ref.name"

// openLayout opens an image of an OCI layout. It takes files over and closes
// them, at once on an error.
func openLayout(ctx context.Context, files files, tag string, o Options) (*Image, error) {
	l := layout{files}
	img, err := l.image(ctx, tag, o)
	if err != nil {
		return nil, errors.Join(err, files.Close())
	}
	img.close = files.Close
	return img, nil
}

type layout struct{ files files }

func (l layout) image(ctx context.Context, tag string, o Options) (*Image, error) {
	raw, err := l.document("index.json")
	if err != nil {
		return nil, err
	}
	var index struct {
		Manifests []v1.Descriptor `json:"manifests"`
	}
	if err := json.Unmarshal(raw, &index); err != nil {
		return nil, fault.Invalid("source", "index.json of the OCI layout is no JSON: %w", err)
	}
	entries, err := tagged(index.Manifests, tag)
	if err != nil {
		return nil, err
	}
	top, err := json.Marshal(document{SchemaVersion: 2, Manifests: entries})
	if err != nil {
		return nil, err
	}
	c := &chooser{arch: o.Architecture, fetch: l.blob, config: l.blob}
	found, err := c.choose(ctx, top)
	if err != nil {
		return nil, err
	}
	cfg, err := c.configOf(ctx, found.manifest)
	if err != nil {
		return nil, err
	}
	img := &Image{Digest: found.digest, Config: cfg}
	for _, d := range found.manifest.Layers {
		img.Layers = append(img.Layers, Layer{
			Digest: d.Digest.String(), Size: d.Size,
			Open: func(context.Context) (io.ReadCloser, error) {
				r, _, err := l.openBlob(d.Digest.String())
				return r, err
			},
		})
	}
	return img.complete(o)
}

// tagged returns the entries of index.json that the tag means; without a tag
// all, if they are one image.
func tagged(all []v1.Descriptor, tag string) ([]v1.Descriptor, error) {
	var tags []string
	for _, d := range all {
		if name := d.Annotations[refName]; name != "" {
			tags = append(tags, name)
		}
	}
	slices.Sort(tags)
	tags = slices.Compact(tags)
	if tag == "" {
		if len(tags) > 1 {
			return nil, fault.Invalid("source", "the OCI layout has several images; name one with :TAG, one of %s", strings.Join(tags, ", "))
		}
		return all, nil
	}
	var picked []v1.Descriptor
	for _, d := range all {
		if d.Annotations[refName] == tag || d.Digest.String() == tag {
			picked = append(picked, d)
		}
	}
	if len(picked) == 0 {
		return nil, fault.Invalid("source", "the OCI layout has no image %q; it has %s", tag, orDefault(strings.Join(tags, ", "), "no tags"))
	}
	return picked, nil
}

func (l layout) document(name string) ([]byte, error) {
	r, _, err := l.files.open(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fault.Invalid("source", "this is no OCI layout: it has no %s", name)
	}
	if err != nil {
		return nil, err
	}
	defer r.Close()
	return readDocument(r, name)
}

func (l layout) openBlob(digest string) (io.ReadCloser, int64, error) {
	kind, hex, ok := strings.Cut(digest, ":")
	if !ok || strings.ContainsAny(digest, "/\\") {
		return nil, 0, fault.Invalid("source", "the OCI layout names a blob %q, which is no digest", digest)
	}
	r, size, err := l.files.open("blobs/" + kind + "/" + hex)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, 0, fault.Invalid("source", "the OCI layout has no blob %s", digest)
	}
	if err != nil {
		return nil, 0, fmt.Errorf("open blob %s: %w", digest, err)
	}
	return r, size, nil
}

// blob reads a small blob and checks it.
func (l layout) blob(_ context.Context, d v1.Descriptor) ([]byte, error) {
	r, _, err := l.openBlob(d.Digest.String())
	if err != nil {
		return nil, err
	}
	defer r.Close()
	return readDocument(Verify(r, "blob", d.Digest.String(), -1), "blob "+d.Digest.String())
}
