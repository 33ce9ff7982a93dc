package apiserver

import (
	"cmp"
	"context"

	"connectrpc.com/connect"

	edgev1 "github.com/kernflux/opendsec/api/gen/edge/v1"
	opendsecv1 "github.com/kernflux/opendsec/api/gen/opendsec/v1"
	"github.com/kernflux/opendsec/api/gen/opendsec/v1/opendsecv1connect"
	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/sandbox"
)

// imageRPC is ImageService in terms of Server.
type imageRPC struct{ s *Server }

var _ opendsecv1connect.ImageServiceHandler = imageRPC{}

type progressStream = connect.ServerStream[opendsecv1.ImportImageResponse]

func (h imageRPC) ImportImage(ctx context.Context, req *connect.Request[opendsecv1.ImportImageRequest], out *progressStream) error {
	name, err := h.s.admitImport(ctx, req.Msg.GetSource(), req.Msg.GetName())
	if err != nil {
		return err
	}
	address, err := h.s.imageNode(ctx)
	if err != nil {
		return err
	}
	in, err := h.s.edges.at(address).ImportImage(ctx, connect.NewRequest(&edgev1.ImportImageRequest{Request: req.Msg}))
	if err != nil {
		return fault.FromConnect(err)
	}
	return h.relay(ctx, name, req.Msg.GetSource(), in, out)
}

func (h imageRPC) BootstrapImage(ctx context.Context, req *connect.Request[opendsecv1.BootstrapImageRequest], out *progressStream) error {
	name, err := h.s.admitBootstrap(ctx, req.Msg.GetDistribution(), req.Msg.GetName())
	if err != nil {
		return err
	}
	address, err := h.s.imageNode(ctx)
	if err != nil {
		return err
	}
	in, err := h.s.edges.at(address).BootstrapImage(ctx, connect.NewRequest(&edgev1.BootstrapImageRequest{Request: req.Msg}))
	if err != nil {
		return fault.FromConnect(err)
	}
	return h.relay(ctx, name, "bootstrap:"+req.Msg.GetDistribution(), in, out)
}

// relay passes a node's progress on, and gives the image its name before its
// caller hears that it is there.
func (h imageRPC) relay(ctx context.Context, name sandbox.ImageName, source string, in *connect.ServerStreamForClient[edgev1.ImportImageResponse], out *progressStream) error {
	defer in.Close() //nolint:errcheck // it has been read to its end, or nobody wants the rest
	var done *opendsecv1.ImportImageResponse
	for in.Receive() {
		p := in.Msg().GetProgress()
		if p.GetImage() != nil {
			done = p
			continue
		}
		if err := out.Send(p); err != nil {
			return err
		}
	}
	if err := in.Err(); err != nil {
		return fault.FromConnect(err)
	}
	if done.GetImage().GetDigest() == "" {
		return fault.New(fault.Unavailable, "the node ended the import of %s without an image: try again", name)
	}
	record, err := imageFromNode(done.GetImage(), "")
	if err != nil {
		return err
	}
	record.Name, record.CreatedAt, record.Source = name, h.s.deps.Now().UTC(), cmp.Or(record.Source, source)
	if err := h.s.nameImage(ctx, record); err != nil {
		return err
	}
	if done.Image, err = h.s.imageToProto(ctx, record); err != nil {
		return err
	}
	return out.Send(done)
}

func (h imageRPC) ListImages(ctx context.Context, req *connect.Request[opendsecv1.ListImagesRequest]) (*connect.Response[opendsecv1.ListImagesResponse], error) {
	images, err := h.s.listImages(ctx, req.Msg.GetProject())
	if err != nil {
		return nil, err
	}
	out, err := h.s.imagesToProto(ctx, images)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&opendsecv1.ListImagesResponse{Images: out}), nil
}

func (h imageRPC) GetImage(ctx context.Context, req *connect.Request[opendsecv1.GetImageRequest]) (*connect.Response[opendsecv1.GetImageResponse], error) {
	m, err := h.s.visibleImage(ctx, req.Msg.GetName())
	if err != nil {
		return nil, err
	}
	p, err := h.s.imageToProto(ctx, m)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&opendsecv1.GetImageResponse{Image: p}), nil
}

func (h imageRPC) TagImage(ctx context.Context, req *connect.Request[opendsecv1.TagImageRequest]) (*connect.Response[opendsecv1.TagImageResponse], error) {
	m, err := h.s.tagImage(ctx, req.Msg.GetName(), req.Msg.GetNewName())
	if err != nil {
		return nil, err
	}
	p, err := h.s.imageToProto(ctx, m)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&opendsecv1.TagImageResponse{Image: p}), nil
}

func (h imageRPC) DeleteImage(ctx context.Context, req *connect.Request[opendsecv1.DeleteImageRequest]) (*connect.Response[opendsecv1.DeleteImageResponse], error) {
	if err := h.s.deleteImage(ctx, req.Msg.GetName()); err != nil {
		return nil, err
	}
	return connect.NewResponse(&opendsecv1.DeleteImageResponse{}), nil
}
